"""The page of a benchmark: what it says, that names stay text, and its charts as ECharts draws them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.bench._jsonl import read_result
from ckpt_core.bench._page import page, sections_of, write_page
from ckpt_core.bench._results import CaseResult, Run, SuiteResult
from tests.support.browser import drawn_by_node, in_browser

NASTY = (
    "</script><script>document.title='stolen'</script><img src=x onerror=alert(1)>\u2028\"'&{a|b}%%"
)
ENVIRONMENT: dict[str, Any] = {
    **{"git_sha": "0123456789abcdef", "device_kind": "cpu", "devices": 8, "processes": 1},
    **{"cpus": 4, "load_average": 0.1, "file_system": "ext4", "drops_page_cache": True},
    "versions": {"ckpt": "1", "jax": "2"},
}


def case(
    label: str, secs: list[float], *, library: str = "", size: int | None = None, **more: Any
) -> CaseResult:
    """A case that saved in these seconds and loaded in a third of them, one run for each."""
    varying = {"library": library} if library else {}
    varying |= {} if size is None else {"size": str(size)}
    group, durable = more.get("group", "Nap"), more.get("durable", "yes")
    runs = [
        Run(
            label,
            "counted",
            number,
            0.0,
            {
                "save": {"0_basics/time_s": [one], "4_throughput/gb_per_s": [1 / one]},
                "load": {"0_basics/time_s": [one / 3]},
            },
            notes={"durable": durable},
        )
        for number, one in enumerate(secs)
    ]
    if "error" in more:
        runs.append(Run(label, "counted", 0, 0.0, error=more["error"], details="Traceback: <b>"))
    config = {"checkpoint": {"name": ""}, "options": {}}
    return CaseResult(
        f"{group}_{label}", label, group, f"{group}.{group}", config, varying, tuple(runs)
    )


def result(*cases: CaseResult, name: str = "naps <1>", **more: Any) -> SuiteResult:
    return SuiteResult(name, ENVIRONMENT, cases, **more)


NAPS = result(
    case("size=1", [0.010, 0.011, 0.012, 0.013], size=1),
    case("size=2", [0.020, 0.022, 0.024, 0.026], size=2),
    case("size=4", [0.040, 0.044, 0.048, 0.052], size=4),
    case("Fails", [], group="Fails", error="ValueError: <planted> & [bold]"),
)


def blocks(found: SuiteResult, kind: str) -> Iterator[dict[str, Any]]:
    """The blocks of a kind in all sections, also those in details."""
    waiting = [block for section in sections_of(found) for block in section["blocks"]]
    while waiting:
        block = waiting.pop(0)
        waiting = [*block.get("blocks", ()), *waiting]
        if kind in block:
            yield block


def texts(found: SuiteResult) -> str:
    return " ".join(block["text"] for block in blocks(found, "text"))


class _Elements(HTMLParser):
    """The elements and addresses of a page, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.names: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def test_the_page_stands_alone_and_is_well_formed(tmp_path: Path):
    found = _Elements(write_page(tmp_path, NAPS).read_text(encoding="utf-8"))
    assert all(address.startswith(("#", "data:,")) for address in found.addresses)
    sections = json.loads(found.scripts[0])["sections"]
    # the first one has the minute
    assert sections[1:] == json.loads(json.dumps(sections_of(NAPS)[1:]))
    assert [f"#s{number}" for number in range(len(sections))] == found.addresses[1:]
    assert {f"s{number}" for number in range(len(sections))} < set(found.ids)


def test_what_the_page_says():
    sections = {section["name"]: section for section in sections_of(NAPS)}
    order = ["naps <1>", "Failed runs", "Nap: time over size", "Nap", "Where"]
    assert list(sections) == order and sections["Failed runs"]["kind"] == "bad"
    assert "8 x cpu, 1 process(es), 4 CPUs, ext4, jax 2, ckpt 1 at 0123456789ab" in texts(NAPS)
    assert "up to 4 repeats" in texts(NAPS) and "whiskers" in texts(NAPS)
    (failed,) = sections["Failed runs"]["blocks"]
    assert failed["details"] == "Fails: Fails, counted run 0: ValueError: <planted> & [bold]"
    assert failed["blocks"] == ({"pre": "Traceback: <b>"},) and not failed["open"]
    titles = [block["title"] for block in blocks(NAPS, "title")]
    assert titles == ["save", "load", "save", "load"]
    tables = [block for block in blocks(NAPS, "table") if block.get("stacked")]
    assert [row[0] for row in tables[0]["table"]] == ["size=1", "size=2", "size=4"]
    names = ["case", "median s", "± 95 %", "min - max", "GB/s", "beside the first", "durable", "n"]
    assert tables[0]["names"] == names and "durable" not in tables[1]["names"]
    assert {*tables[0]["right"]} == {"median s", "± 95 %", "min - max", "GB/s", "n"}
    assert "all 9 metrics" in [block["details"] for block in blocks(NAPS, "details")]
    where = next(block for block in blocks(NAPS, "table") if block["names"] == ("fact", "value"))
    assert ["versions", '{"ckpt": "1", "jax": "2"}'] in where["table"]


def test_bars_have_medians_intervals_and_single_values():
    save, load = blocks(NAPS, "bars")
    assert [bar["label"] for bar in save["bars"]] == ["size=1", "size=2", "size=4"]
    first = save["bars"][0]
    assert first["median"] == pytest.approx(0.0115) and len(first["values"]) == 4
    low, high = first["interval"]
    assert low < 0.0115 < high and (low + high) / 2 == pytest.approx(0.0115)
    assert first["spelled"] == "0.0115 ± 0.00205" and not first["pale"] and not save["log"]
    assert load["bars"][0]["median"] == pytest.approx(0.0115 / 3)


def test_an_axis_is_logarithmic_where_a_linear_one_hides_values():
    far = result(case("a", [1.0]), case("b", [3.0]), case("c", [1000.0]))
    near = result(case("a", [1.0]), case("b", [3.0]))
    assert [block["log"] for block in blocks(far, "bars")] == [True, True]
    assert [block["log"] for block in blocks(near, "bars")] == [False, False]
    zero = result(case("z", [1.0]), case("y", [1000.0]))
    zero.cases[0].runs[0].values["save"]["0_basics/time_s"][:] = [0.0]
    assert next(blocks(zero, "bars"))["log"] is False


def test_a_swept_number_gets_lines_with_three_points_at_least():
    save, _ = blocks(NAPS, "lines")
    (line,) = save["lines"]
    assert (save["x"], save["unit"], line["label"]) == ("size", "seconds", "Nap")
    assert [point[0] for point in line["points"]] == [1.0, 2.0, 4.0]
    assert line["points"][1][1] == pytest.approx(0.023) and line["points"][1][2] < 0.023
    two = result(*NAPS.cases[:2])
    assert list(blocks(two, "lines")) == []


def test_of_a_single_run_nothing_is_said_of_its_spread():
    single = result(case("size=1", [0.01]), case("size=2", [0.02]))
    assert "one run of each" in texts(single) and "whiskers" not in texts(single)
    for bar in next(blocks(single, "bars"))["bars"]:
        assert bar["values"] == () and bar["interval"] == (None, None) and "±" not in bar["spelled"]
    for block in blocks(single, "table"):
        assert not {"± 95 %", "min - max"} & set(block["names"])


def test_a_page_of_an_interrupted_run_with_nothing_in_it():
    empty = result(interrupted=True)
    assert "interrupted: what is here is complete" in texts(empty) and page(empty)


def test_saves_that_a_power_cut_loses_are_pale_and_ckpt_has_the_first_colour():
    found = result(
        case("orbax", [1.0, 1.1], library="orbax", durable="data files"),
        case("ckpt", [0.5, 0.6], library="ckpt"),
    )
    save, load = blocks(found, "bars")
    assert [(bar["pale"], bar["colour"]) for bar in save["bars"]] == [(True, 1), (False, 0)]
    assert not any(bar["pale"] for bar in load["bars"])  # a load acknowledges nothing
    assert texts(found).count("Pale: not durable") == 1 and "Pale" not in texts(NAPS)


def nasty() -> SuiteResult:
    """Names of everything that a results file may hold, of which none is a name."""
    cases = [
        case(f"{NASTY}{size}", [0.1 * size], library=f"{NASTY}{size}", size=size, group=NASTY)
        for size in (1, 2, 3)
    ]
    cases.append(case(NASTY, [], group=NASTY, error=NASTY))
    environment = {**ENVIRONMENT, NASTY: NASTY, "device_kind": NASTY}
    return SuiteResult(NASTY, environment, tuple(cases))


def test_names_in_a_results_file_are_no_markup():
    found, plain = _Elements(page(nasty())), _Elements(page(NAPS))
    assert set(found.names) == set(plain.names) and "img" not in found.names
    assert found.names.count("script") == plain.names.count("script")
    assert all(address.startswith(("#s", "data:,")) for address in found.addresses)
    data = json.loads(found.scripts[0])
    assert data["sections"][0]["name"] == NASTY
    assert data["sections"][1:] == json.loads(json.dumps(sections_of(nasty())[1:]))


def test_a_hostile_file_is_read_and_drawn_as_text(tmp_path: Path):
    """From the lines of JSON to the page in a real browser, where there is one."""
    record = {"record": "environment", "suite_name": NASTY, **ENVIRONMENT}
    run = {
        **{"record": "run", "label": NASTY, "group": NASTY, "case": NASTY, "kind": "counted"},
        **{"repeat": 0, "started_unix_secs": 0.0, "hosts": [], "notes": {"durable": NASTY}},
        "values": {NASTY: {"0_basics/time_s": [1.0, 2.0]}},
        **{"error": None, "details": None, "skipped": None},
    }
    config = {"config": {"checkpoint": {"name": NASTY}}, "generator": NASTY, "skipped": None}
    last = {"record": "case", "case": NASTY, "label": NASTY, "group": NASTY, **config}
    lines = tmp_path / "results.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in (record, run, last)))
    file = write_page(tmp_path, read_result(lines))
    wide = "setTimeout(()=>{document.body.dataset.wide=document.documentElement.scrollWidth>innerWidth},500)"
    for width in (400, 1280):
        dom, log = in_browser(file, tmp_path, width, wide)
        assert 'data-drawn="yes"' in dom, log
        assert "CONSOLE" not in log and "<img" not in dom and "stolen</title>" not in dom
        assert dom.count('role="img"') == 1 and "<svg" in dom and 'data-wide="false"' in dom


def test_the_charts_as_echarts_draws_them():
    script = (files("ckpt_core.bench") / "page.js").read_text()
    bars, lines = next(blocks(NAPS, "bars")), next(blocks(NAPS, "lines"))
    far = next(blocks(result(case("a", [1.0, 1.1]), case("b", [900.0, 901.0])), "bars"))
    evil = next(blocks(nasty(), "bars"))
    calls = [("bars", bars), ("lines", lines), ("bars", far), ("bars", evil)]
    drawn = drawn_by_node(script, calls)
    plain, curves, logarithmic, escaped = (svg for svg, _ in drawn)
    for text in ("size=1", "0.0115 ± 0.00205", "seconds"):
        assert f">{text}<" in plain
    assert "log scale" not in plain and ">seconds, log scale<" in logarithmic
    assert ">size (log); seconds (log)<" in curves
    assert all("NaN" not in svg for svg, _ in drawn)
    assert "<img" not in escaped and "<script" not in escaped and "&lt;script&gt;" in escaped
    tooltips = [tooltip for _, tooltip in drawn]
    assert tooltips[0] == "<b>size=1</b><br>0.0115 ± 0.00205 seconds"
    assert tooltips[1] == "<b>Nap</b><br>0.0115 ± 0.00205 seconds"
    assert "<img" not in tooltips[3] and "<script" not in tooltips[3]
