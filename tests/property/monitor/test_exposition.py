"""Whatever an agent reports, its page can be read by Prometheus and says exactly that."""

from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuscale.api.types import v1 as types_api
from gpuscale.common.runtime.metrics_text import Family, MetricsPage, labels
from gpuscale.monitor.exposition.snapshots import add_snapshot
from gpuscale.monitor.model.prometheus import DCGM, GPU, Style

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20)
NUMBER = st.floats(0, 1e15) | st.integers(0, 2**53)


@settings(max_examples=30)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.text(max_size=9), max_size=4), NUMBER)
def test_a_sample_is_read_back_as_it_was_written(pairs: dict[str, str], number: float) -> None:
    page = MetricsPage()
    page.add(Family("some_name", "gauge", 'help with \\ and "'), labels(pairs), number)
    [family] = text_string_to_metric_families(b"".join(page.chunks()).decode())
    assert family.documentation == 'help with \\ and "'
    assert family.samples[0].labels == {name: text for name, text in pairs.items() if text}
    assert family.samples[0].value == number


FLAGS = {one.name for one in types_api.GpuReading.DESCRIPTOR.fields if one.cpp_type == one.CPPTYPE_BOOL}


@settings(max_examples=30)
@given(
    model=TEXT,
    hostname=TEXT,
    fields=st.fixed_dictionaries(
        {}, optional={series.field: st.integers(0, 100) for series in GPU if series.field not in FLAGS}
    ),
)
def test_a_page_shows_what_was_read_and_nothing_else(
    model: str, hostname: str, fields: dict[str, int]
) -> None:
    reading = ParseDict(fields, types_api.GpuReading())
    gpu = types_api.Gpu(uuid="GPU-1", model=model, state=types_api.GpuState.GPU_STATE_OK, reading=reading)
    snapshot = types_api.Snapshot(node="alpha", host=types_api.Host(hostname=hostname), gpus=[gpu])
    page = MetricsPage()
    add_snapshot(page, snapshot, Style("all"), fresh=True, quarantined=())
    text = b"".join(page.chunks()).decode()
    shown = {family.name: family.samples for family in text_string_to_metric_families(text)}
    for series in (*GPU, *DCGM):
        name = series.family.name
        name = name.removesuffix("_total") if series.family.kind == "counter" else name
        if series.field in fields:
            assert [one.value for one in shown[name]] == [series.convert(fields[series.field])]
        else:
            assert name not in shown
