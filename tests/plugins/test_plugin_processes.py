"""A plugin seen in the parent is seen in the worker (field report F-02), in-process, spawned and forked."""

from __future__ import annotations

from plugin_distributions import install, plugin_source, run_json

# The worker function lives in a module, as spawn imports it anew.
WORKER = """
import os
from types import SimpleNamespace
from model_states import PluginManager

CHECKPOINT = SimpleNamespace(architecture="CountedLM", model="m", raw_config={}, hf_config=None)

def resolve(queue, manager=None):
    manager = manager or PluginManager()
    queue.put((os.getpid(), manager.select(CHECKPOINT).name))
"""

COUNTED = (
    plugin_source("counted", "CountedLM")
    + """
import os
def _count():
    with open(os.environ["REGISTRATIONS"], "a") as log:
        log.write(f"{os.getpid()}\\n")
"""
).replace("    return [State]", "    _count()\n    return [State]")

BY_ENTRY_POINT = """
import json, multiprocessing, os, queue
from collections import Counter
from worker import resolve

results = []
here = queue.Queue()
resolve(here)
results.append(here.get())
for method in ("spawn", "fork"):
    context = multiprocessing.get_context(method)
    there = context.Queue()
    worker = context.Process(target=resolve, args=(there,))
    worker.start()
    results.append(there.get(timeout=60))
    worker.join(60)
counts = Counter(open(os.environ["REGISTRATIONS"]).read().split())
print(json.dumps({"names": [name for _, name in results], "counts": [counts[str(pid)] for pid, _ in results],
                  "total": sum(counts.values()), "pids": len({pid for pid, _ in results})}))
"""

BY_CALL = """
import json, multiprocessing, queue
import script_plugin
from worker import resolve
from model_states import PluginManager

manager = PluginManager(autoload=False, plugins=[script_plugin])
here = queue.Queue()
resolve(here, manager)
fork = multiprocessing.get_context("fork")
there = fork.Queue()
worker = fork.Process(target=resolve, args=(there, manager))
worker.start()
forked = there.get(timeout=60)[1]
worker.join(60)
spawn = multiprocessing.get_context("spawn")
worker = spawn.Process(target=resolve, args=(None, manager))
try:
    worker.start()
    refusal = "started"
except Exception as error:
    refusal = f"{type(error).__name__}: {error}"
print(json.dumps({"here": here.get()[1], "forked": forked, "refusal": refusal}))
"""


def test_entry_point_registers_once_in_every_process(tmp_path):
    install(tmp_path, "counted", COUNTED)
    (tmp_path / "worker.py").write_text(WORKER)
    seen = run_json(
        tmp_path,
        BY_ENTRY_POINT,
        REGISTRATIONS=str(tmp_path / "registrations"),
        MODEL_STATES_DISABLE="decoder",
    )
    assert seen["names"] == ["counted"] * 3
    assert seen["counts"] == [1, 1, 1]
    assert (seen["total"], seen["pids"]) == (3, 3)


def test_registration_by_call_works_where_it_reaches_and_is_refused_where_not(tmp_path):
    (tmp_path / "script_plugin.py").write_text(plugin_source("scripted", "CountedLM"))
    (tmp_path / "worker.py").write_text(WORKER)
    seen = run_json(tmp_path, BY_CALL)
    assert seen["here"] == seen["forked"] == "scripted"
    assert seen["refusal"].startswith(
        "PluginError: a PluginManager cannot be sent to another process; make one there"
    )
    assert "entry point of the group 'model_states'" in seen["refusal"]
