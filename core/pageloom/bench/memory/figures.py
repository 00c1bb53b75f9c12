"""The paper's figures drawn again, with its numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pageloom.bench.figures import new_figure, png
from pageloom.bench.memory import paper
from pageloom.bench.memory.experiments import BLOCK_SIZES, Results, Sharing
from pageloom.bench.memory.report import PARTS
from pageloom.bench.memory.usage import EXTERNAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, which can be told apart by everyone.
PART_COLORS = {
    "token_states": "#009E73",
    "reserved": "#56B4E9",
    "internal": "#E69F00",
    EXTERNAL: "#BBBBBB",
}
PAPER_COLOR, OUR_COLOR = "#999999", "#0072B2"


def draw(results: Results) -> dict[str, bytes]:
    """PNG files by name."""
    return {
        "memory.png": png(_memory(results)),
        "batched.png": png(_batched(results)),
        "sharing.png": png(_sharing(results)),
        "block_sizes.png": png(_block_sizes(results)),
    }


def _memory(results: Results) -> Figure:
    figure, (axes,) = new_figure("KV memory in use, ShareGPT at 2 requests/s (figure 2)")
    for index, system in enumerate(paper.SYSTEMS):
        shares = results.serving[paper.SHAREGPT, system].shares
        ours = [100 * shares[part].mean for part in PARTS]
        published = [paper.MEMORY[system].get(part, 0.0) for part in PARTS]
        for position, values in ((index - 0.2, published), (index + 0.2, ours)):
            _stack(axes, position, values, labeled=position == 0.2)
    axes.set_xticks(
        [index + shift for index in range(len(paper.SYSTEMS)) for shift in (-0.2, 0.2)],
        [text for system in paper.SYSTEMS for text in (f"paper\n{system}", "here")],
    )
    axes.set_ylabel("percent of the KV memory")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
    return figure


def _stack(axes: Axes, position: float, values: Sequence[float], *, labeled: bool) -> None:
    """One bar of the parts of the KV memory."""
    bottom = 0.0
    for (part, name), value in zip(PARTS.items(), values, strict=True):
        label = name if labeled else None
        axes.bar(position, value, 0.36, bottom=bottom, color=PART_COLORS[part], label=label)
        if value > 4:
            axes.text(position, bottom + value / 2, f"{value:.1f}", ha="center", va="center")
        bottom += value


def _batched(results: Results) -> Figure:
    figure, panels = new_figure("Requests batched, average (figure 13)", columns=2)
    for axes, (workload, published) in zip(panels, paper.BATCHED.items(), strict=True):
        ours = [results.serving[workload, system].requests for system in paper.SYSTEMS]
        _pairs(
            axes,
            [system.replace(" ", "\n") for system in paper.SYSTEMS],
            [published[system] for system in paper.SYSTEMS],
            [estimate.mean for estimate in ours],
            [2 * estimate.error for estimate in ours],
        )
        axes.set_title(f"{workload}, {paper.REQUEST_RATES[workload]:g} requests/s")
        axes.set_ylabel("requests")
    return figure


def _sharing(results: Results) -> Figure:
    figure, panels = new_figure(
        "Blocks saved by sharing (figure 15, section 6.3)", rows=2, columns=2
    )
    for axes, ((workload, method), published) in zip(panels, paper.SAVED.items(), strict=True):
        _pairs(
            axes,
            [str(width) for width in paper.WIDTHS],
            [published.get(width, 0.0) for width in paper.WIDTHS],
            [
                100 * results.saved[Sharing(workload, method, width)].of_blocks
                for width in paper.WIDTHS
            ],
        )
        axes.set_title(f"{workload}, {method}")
        axes.set_xlabel("samples" if method == "parallel sampling" else "beams")
        axes.set_ylabel("percent of the blocks")
    return figure


def _block_sizes(results: Results) -> Figure:
    figure, panels = new_figure("What a block size costs under overload (section 7.2)", columns=2)
    for axes, workload in zip(panels, results.sources, strict=True):
        measured = [results.block_sizes[workload, size] for size in BLOCK_SIZES]
        parts = ("token_states", "internal", EXTERNAL)
        axes.stackplot(
            range(len(BLOCK_SIZES)),
            [[100 * one.shares[part].mean for one in measured] for part in parts],
            colors=[PART_COLORS[part] for part in parts],
            labels=["token states", "rest of last blocks", "free"],
        )
        axes.axvline(BLOCK_SIZES.index(paper.BLOCK_SIZE), color="black", linestyle=":")
        axes.set_xticks(range(len(BLOCK_SIZES)), [str(size) for size in BLOCK_SIZES])
        axes.set_xlabel("block size, tokens (dotted: the paper's choice)")
        axes.set_ylabel("percent of the KV memory")
        axes.set_ylim(0, 100)
        axes.set_title(workload)
        axes.legend(loc="lower left")
    return figure


def _pairs(
    axes: Axes,
    names: Sequence[str],
    published: Sequence[float],
    ours: Sequence[float],
    spread: Sequence[float] | None = None,
) -> None:
    """Bars in pairs; a published number of 0 is one that there is not."""
    for shift, values, color, label in (
        (-0.2, published, PAPER_COLOR, "paper"),
        (0.2, ours, OUR_COLOR, "here"),
    ):
        bars = axes.bar(
            [index + shift for index in range(len(names))],
            values,
            0.38,
            color=color,
            label=label,
            yerr=spread if label == "here" else None,
        )
        axes.bar_label(bars, [f"{value:.1f}" if value else "" for value in values])
    axes.set_xticks(range(len(names)), names)
    axes.margins(y=0.15)
    axes.legend(loc="upper left")
