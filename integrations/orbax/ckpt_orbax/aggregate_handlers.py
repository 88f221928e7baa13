"""Nothing of Orbax's ``aggregate_handlers`` is offered; each name says why."""

__all__: list[str] = []
