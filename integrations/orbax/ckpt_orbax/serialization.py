"""Nothing of Orbax's ``serialization`` is offered; each name says why."""

from ckpt_orbax._refused import refusing

__all__: list[str] = []

__getattr__ = refusing(__name__)
