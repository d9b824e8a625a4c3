"""The process in which an engine was made. A fork copies its memory and none of its threads."""

from __future__ import annotations

import os

from hogwild_engine.api.errors import EngineClosedError


class Origin:
    """The process that makes this object. In a forked child no lock of the engine may be taken and
    no thread be waited for: whoever held or ran it does not exist there.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the current process is the one that made it."""
        return self._pid == os.getpid()

    def require_here(self, name: str) -> None:
        """Raise an error in a forked child.

        Args:
            name: what belongs to the other process, for the error.

        Raises:
            EngineClosedError: this is another process.
        """
        if not self.is_here:
            raise EngineClosedError(
                f"{name}: wanted one of this process, got one of process {self._pid}, which was "
                f"forked; make a new engine here, or start processes by 'spawn'"
            )
