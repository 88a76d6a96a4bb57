"""Packages that a test installs for other processes: a folder for PYTHONPATH, with modules and the metadata of entry points."""

import os
from pathlib import Path


def package(folder, name, code, *, version="1.0", entry_points=None):
    """Write a package of one module (None: no more than its metadata); return what PYTHONPATH must be to have it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if code is not None:
        (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (f"[{group}]\n{entries}\n" for group, entries in (entry_points or {}).items())
    (info / "entry_points.txt").write_text("\n".join(groups))
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
