"""Nothing of Orbax's ``serialization`` is offered; each name says why."""

__all__: list[str] = []
