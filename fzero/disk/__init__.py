"""Files: every call to the system in one place, and the file in which a rank keeps what is not in memory. See
README.md."""

from __future__ import annotations

from fzero.disk.calls import Disk
from fzero.disk.direct import aligned
from fzero.disk.disk_file import DiskFile
from fzero.disk.sums import UNIT

__all__ = ["UNIT", "Disk", "DiskFile", "aligned"]
