"""Triton's interpreter without what takes a third of its time: at each call of a function, of a
helper within a kernel too, it replaces all of ``triton.language`` anew."""

from __future__ import annotations

from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def replace_language_once() -> None:
    """From now on what was replaced stays so, in this process. It must only interpret."""
    replace, replaced = interpreter._patch_lang, set()

    def replace_once(function):
        found = set(map(id, function.__globals__.values())) & {id(tl), id(tl.core)}
        if not replaced.issuperset(found):
            replace(function)
            replaced.update(found)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once
