"""Read stored arrays into host memory: ``native`` reads ckpt's format, ``orbax`` reads Orbax's."""
