"""How much memory this process may still take: the machine's, and its control group's."""

from __future__ import annotations

from pathlib import Path


def _number(path: Path) -> int | None:
    """The number in a control-group file; None for "max" or a file that is not there."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _group(root: Path) -> Path:
    """This process's control group (version 2) under `root`."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return root
    unified = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return root / unified[0] if unified else root


def group_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under the tightest memory limit of the control groups, None without a limit.

    File pages that can be dropped (`inactive_file`) count as left: the mapped checkpoint is there.
    """
    group, left = _group(root), []
    for folder in [group, *group.parents]:
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            left.append(limit - used + _inactive_file(folder))
        if folder == root:
            break
    return max(0, min(left)) if left else None


def _inactive_file(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def machine_available() -> int:
    """MemAvailable of /proc/meminfo, bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def available_bytes() -> int:
    """Bytes that this process may still take."""
    group = group_available()
    return machine_available() if group is None else min(group, machine_available())


def resident_anonymous_bytes() -> int:
    """Anonymous memory of this process that is really resident (RssAnon)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")
