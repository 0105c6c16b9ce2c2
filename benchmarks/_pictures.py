"""Curves over the length of a sequence, for the pictures of the documents."""


def pyplot():
    """Matplotlib without a window. The same rows give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "flash-attn"
    return plt


def curves(axis, points):
    """One curve for each kernel: points of (length, figure). Later curves have smaller marks, so that curves that
    coincide are seen as rings."""
    for i, (kernel, of_kernel) in enumerate(points.items()):
        if of_kernel:
            axis.plot(*zip(*of_kernel), marker="o", label=kernel, markersize=4 + 1.5 * (len(points) - 1 - i))
    lengths = sorted({length for of_kernel in points.values() for length, _ in of_kernel})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axis.set_xlabel("length")
    axis.grid(alpha=0.3)


def save(figure, path, bottom=0):
    """bottom: the share of the height that is left for a legend."""
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, metadata={"Date": None})
