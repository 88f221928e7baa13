"""Nothing of Orbax's ``msgpack_utils`` is offered; each name says why."""

__all__: list[str] = []
