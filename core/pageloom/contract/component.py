"""What every registered class has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Component:
    """Base of the classes that a plugin registers.

    A component may carry a nested dataclass named ``Config``. The YAML mapping ``options`` of the
    section that picked the component is validated against it (unknown keys and wrong types are
    reported with file and line), and the instance is handed to the constructor::

        class MyScheduler(Scheduler):
            @dataclass
            class Config:
                window: int = 8

    Fields need defaults unless the user must give them, and may be ``bool``, ``int``, ``float``,
    ``str``, enums, lists and dicts of these, nested dataclasses, and optional forms. A ``Config``
    may raise `ValueError` in ``__post_init__``; its message is shown to the user as it is.
    """

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any) -> None:
        self.config = config
