"""What stands on disk, to and from frozen dataclasses: our own record, and Orbax's metadata. Pure."""
