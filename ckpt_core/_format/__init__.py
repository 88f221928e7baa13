"""Parsers and writers of the files on disk: our record, checksums, Orbax's metadata. Pure."""
