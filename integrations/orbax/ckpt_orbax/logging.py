"""Bases of loggers of your own; ckpt's engine reports its events to ``ckpt_core.Options(on_event=)``."""

from __future__ import annotations

import abc
import logging
from typing import Any


class AbstractLogger(abc.ABC):
    """Takes entries about saves and restores; a CheckpointManager refuses it."""

    @abc.abstractmethod
    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Takes one entry."""


class StandardLogger(AbstractLogger):
    """Writes entries to Python's log."""

    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Writes one entry."""
        logging.getLogger("ckpt_orbax").info(msg, *args, **kwargs)


class CompositeLogger(AbstractLogger):
    """Gives entries to several loggers."""

    def __init__(self, *loggers: AbstractLogger) -> None:
        self._loggers = loggers

    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Gives one entry to each of them."""
        for logger in self._loggers:
            logger.log_entry(msg, *args, **kwargs)


__all__ = ["AbstractLogger", "CompositeLogger", "StandardLogger"]
