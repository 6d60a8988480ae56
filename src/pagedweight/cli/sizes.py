"""Bytes for people."""


def size(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
