"""The server that benchmarks/mirror_cost.py uploads to, and which steps are compared."""

from __future__ import annotations

import threading
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.mirror_cost import Found, compare, while_saving, while_uploading
from benchmarks.s3_sink import KEPT_BYTES, Handler
from megatrain_ray.config.urls import StoreUrl
from megatrain_ray.io.storage.object_store import ObjectStore
from tests.support.object_server import CREDENTIALS

PLAIN = Found(False, [9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0] * 7, {}, [], 10**9, 2.0, 2**30)
# Each row counts as uploading whose save before it is not in the mirror yet: those of steps 3 and 5.
MIRRORED = replace(
    PLAIN, is_mirrored=True, step_s=[9.0, 9.0, 1.2, 1.0, 1.4, 1.0, 1.0], mirror_lag=[1, 2, 3, 2, 3, 2, 1],
    upload_s={2: 2.0, 4: 0.5, 6: 0.5}, saving=[4, 5], driver_cpu_s=5.0,
)  # fmt: skip


def test_the_sink_keeps_small_objects_and_the_sizes_of_large_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"endpoint_override=127.0.0.1:{server.server_port}&scheme=http"
        store = ObjectStore(StoreUrl.parse(f"s3://bucket/run?{address}"))
        assert store.find() == []
        source = tmp_path / "source"
        source.write_bytes(bytes(11 * KEPT_BYTES + 1))
        store.upload(source, "saves/step_2/blob")
        store.write("a & b.json", b"{}")
        assert {item.name: item.nbytes for item in store.find()} == {"a & b.json": 2, "saves/step_2/blob": 11534337}
        assert store.read("a & b.json") == b"{}"
        store.delete("a & b.json")
        store.delete_folder("saves/step_2")
        assert store.find() == []
        del store
        server.shutdown()
        thread.join()


def test_steps_that_uploaded_are_compared() -> None:
    assert list(while_uploading(MIRRORED, 2)) == [3, 5]
    summary = compare([PLAIN, MIRRORED], 2)
    assert summary["steps_then"] == 2
    assert summary["cost_then"] == pytest.approx(0.3)
    assert summary["steps_of_upload"] == 1
    assert summary["cost_of_upload"] == pytest.approx(0.2)
    assert summary["cost_of_all_steps"] == pytest.approx(0.12)
    assert summary["driver_cpu_s_per_gb"] == pytest.approx(1.0)


def test_steps_in_which_a_save_is_written_are_read_from_the_log() -> None:
    at = "2026-01-01 00:00:00,000 INFO megatrain_ray.driver"
    steps = {step: f"{at}.session: step {step}  0.5 s: compute 0.5\n" for step in range(1, 7)}
    saved = f"{at}.run_saves: saved step 2: SaveTiming(predicted_stall_s=0.0)\n"
    lines = [steps[1], steps[2], steps[3], steps[4], saved, steps[5], steps[6]]
    assert list(while_saving("".join(lines))) == [2, 3, 4, 5]
