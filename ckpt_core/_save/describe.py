"""The files that describe a checkpoint for Orbax. Pure: names and bytes, from what is known before arrays are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_core._format import orbax_write
from ckpt_core._format.record import dump_json
from ckpt_core._save.job import PreparedItem, RecordFields, SaveJob

_OF_METRICS = "metrics", "json"
"""Name and form of an item whose values stand where Orbax looks for metrics, too."""


def metadata_files(
    job: SaveJob, fields: RecordFields, items: Sequence[PreparedItem]
) -> Iterator[tuple[str, bytes]]:
    """Name and content of all files that Orbax reads besides the arrays."""
    handlers: dict[str, str] = {}
    for item in items:
        handlers[item.folder] = item.handler or orbax_write.HANDLERS[_handler(item)]
        if item.record.form == "process":
            note = dump_json({"format": "ckpt process state", "process_count": job.writers.count})
            yield f"{item.folder}/metadata", note
            yield f"{item.folder}/data.json", note
            continue
        if item.plan is None:
            continue
        for folder in (f"{item.folder}/", *([""] if job.flat else [])):
            for name, data in item.plan.files:
                yield folder + name, data
            if item.texts:
                paths = dict(zip(item.names, item.record.paths, strict=True))
                yield (
                    folder + orbax_write.STRINGS_FILE,
                    orbax_write.strings_file(item.texts, paths),
                )
    told = [one.state_files for one in items if (one.name, one.record.form) == _OF_METRICS]
    if fields.metrics or told:
        handlers["metrics"] = orbax_write.HANDLERS["json"]
        numbers = dump_json(dict(fields.metrics))
        yield "metrics/metrics", told[0]["data.json"] if told else numbers
    yield orbax_write.STEP_METADATA, orbax_write.step_metadata(handlers, fields.metadata)
    text = f"Checkpoint commit was successful to {job.target}"
    said = text.encode(errors="surrogateescape")
    if not job.local:  # there Orbax asks for one in each item that it opens by itself
        mark = orbax_write.COMMIT_FILE
        for item in items:
            if item.record.form != "files" or mark in item.record.notes:
                yield f"{item.folder}/{mark}", said
    yield orbax_write.COMMIT_FILE, said


def _handler(item: PreparedItem) -> str:
    if item.record.form != "tree":
        return "json"
    return "text_tree" if item.texts else "tree"
