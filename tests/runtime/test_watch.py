"""Watching a service by its timeline and by a server's /metrics."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pagedweight.errors import UserError
from pagedweight.runtime.timeline import TimelineWriter
from pagedweight.runtime.watch import FileSource, History, ServerSource, source_of
from timelines import FIRST, HEADER, burst, write


@contextmanager
def answering(text, status=200):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_rates_are_over_the_last_two_seconds():
    history = History()
    history.add(FIRST)
    assert history.rate("rows_lowered") is None
    for sample in burst(100):
        history.add(sample)
    # The burst ends at 10 s: 8 rows every 0.1 s were raised, none was lowered.
    assert history.rate("rows_raised") == pytest.approx(80)
    assert history.rate("rows_lowered") == 0


def test_a_sample_holds_until_the_next():
    history = History()
    for at, tokens in ((0, 0), (100, 500), (101, 900)):
        history.add(replace(FIRST, monotonic=100.0 + at, tokens_generated=tokens))
    assert history.rate("tokens_generated") == 450


def test_a_timeline_is_followed(tmp_path):
    samples = burst(10)
    writer = TimelineWriter(tmp_path / "a.jsonl", HEADER)
    source = FileSource(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="no sample yet"):
        source.read()
    for sample in samples[:4]:
        writer.write(sample)
    writer.flush()
    view = source.read()
    assert view.sample.step == 3
    assert (view.model, view.levels, view.usable_at_start) == ("tiny", HEADER.levels, 64)
    assert source.read().sample.step == 3
    for sample in samples[4:]:
        writer.write(sample)
    writer.close()
    assert source.read().sample.step == 10


def test_a_server_without_our_metrics_is_told_apart_from_none(tmp_path):
    with answering('vllm:num_requests_running{engine="0"} 1.0\n') as url:
        with pytest.raises(UserError, match=r"no pagedweight metrics.*--memory"):
            ServerSource(url).read()
        address = url
    with pytest.raises(UserError, match="does not answer"):
        ServerSource(address).read()
    with answering("", status=500) as url, pytest.raises(UserError, match="does not answer"):
        ServerSource(url).read()


def test_metrics_of_another_release_or_engine_are_refused():
    info = (
        'pagedweight_info{block_tokens="32",engine="0",granule_blocks="4",levels="2,3",model="m",'
        'precision="elastic",version="9"} 1.0\n'
    )
    with answering(info) as url:
        with pytest.raises(UserError, match="same release"):
            ServerSource(url).read()
        with pytest.raises(UserError, match="engines 0, not engine 3"):
            ServerSource(url, engine=3).read()


def test_what_is_a_file_and_what_an_address(tmp_path):
    path = write(tmp_path / "a.jsonl", burst(2))
    assert isinstance(source_of(str(path)), FileSource)
    for where in ("http://host:8000", "host:8000", "http://host:8000/metrics", "http://host:8000/"):
        source = source_of(where)
        assert isinstance(source, ServerSource)
        assert source.name == "http://host:8000"
    for where in (str(tmp_path / "none"), "none.jsonl"):
        with pytest.raises(UserError, match="there is no timeline"):
            source_of(where)
