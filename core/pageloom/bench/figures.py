"""What the reports' figures have in common."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

from pageloom.errors import PageloomError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, which can be told apart by everyone.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


def require_matplotlib() -> None:
    """Raises `PageloomError` if it is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PageloomError(
            "the figures are drawn with matplotlib, which is not installed: "
            "pip install 'pageloom[bench]', or leave --output out"
        ) from error


def new_figure(
    title: str, rows: int = 1, columns: int = 1, height: float = 4.5
) -> tuple[Figure, list[Axes]]:
    """A figure of panels, each row ``height`` inches high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height * rows), layout="constrained")
    figure.suptitle(title)
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def png(figure: Figure) -> bytes:
    buffer = BytesIO()
    # No date and no version in the file: the same numbers give the same bytes.
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()
