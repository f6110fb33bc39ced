"""What a runtime gives to keep its workers apart: floors below it know no threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, final


class AbstractLock(Protocol):
    """``threading.Lock`` or ``NoLock``."""

    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> object: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...


MakeLock: TypeAlias = Callable[[], AbstractLock]


@final
class NoLock:
    """For a runtime of one thread."""

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        pass
