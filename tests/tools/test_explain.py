"""What explain reports: the golden page of each strategy, and that its parts are true."""

import html
import json
import math
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from browser import Browser
from golden import make_explain as golden
from helpers import command_line_of, config, in_full, one_sentence, program, strategy
from jax.sharding import NamedSharding, PartitionSpec
from variants import ADAPTERS

import strategies
from lab.analysis import explanation, gpus, links
from lab.analysis.case import Case
from lab.analysis.compiled import CompiledStep, DoesNotFit, compile_step
from lab.analysis.fixes import cheapest
from lab.analysis.timeline import timeline, units
from lab.analysis.topology import machine_of
from lab.views import strategy_page
from reporting import pages
from reporting.pages.units import amount
from runtime import command_line, hardware
from tools import explain

ROOT = Path(__file__).parents[2]
SHORT = ("fsdp",)  # the strategy whose page `make test` checks


def marks(name: str) -> list[pytest.MarkDecorator]:
  return [pytest.mark.full] * (name not in SHORT) + [pytest.mark.both_stacks] * golden.has_own_page(name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in golden.names(strategies.names())])
def test_what_a_strategy_places_and_sends_is_the_golden_page(name: str):
  """If a change is intended, run python -m tests.golden.make_explain and read the diff."""
  file = golden.file(name)
  if not file.exists():
    pytest.skip(f"no golden page for {name}; write it with python -m tests.golden.make_explain")
  assert golden.page(name) == file.read_text()


# Array → what the page says of each device: picks every array and focuses every device, as one does with the keyboard.
PIECES = """() => {
  const figure = document.querySelector("[data-placement]"), picker = figure.querySelector("select"), found = {};
  for (const option of picker.options) {
    picker.value = option.value;
    picker.dispatchEvent(new Event("change"));
    found[`${option.parentElement.label}: ${option.text}`] = [...figure.querySelectorAll("button")].map((button) => {
      button.focus();
      return figure.querySelector("output").textContent;
    });
  }
  return found;
}"""


@pytest.mark.parametrize("name", in_full(strategies.names(), *SHORT))
def test_the_page_of_a_strategy_shows_which_piece_is_where(name: str, browser: Browser, tmp_path: Path):
  """Picking and pointing say what JAX's shardings say, for every weight, moment and activation."""
  found, runner = golden.explained(name, None, "tokens"), golden.strategy(name)
  pages.write(tmp_path / "page.html", strategy_page.page(found, runner))
  seen = browser.look(tmp_path / "page.html", lambda page: page.evaluate(PIECES))
  assert (seen.errors, seen.requests, seen.overflow) == ([], [], 0)
  assert browser.look(tmp_path / "page.html", width=360, color_scheme="dark") == (None, [], [], 0)
  expected = 0
  for row in found["weights"]:
    for group, spec in (("weights", row["spec"]), ("moments of the optimizer", row["state"])):
      said = seen.value.get(f"{group}: {row['name']}")
      assert (said is None) == (group != "weights" and all(w["state"] == w["spec"] for w in found["weights"]))
      if said:
        sharding = NamedSharding(runner.mesh, PartitionSpec(*spec))
        slices = sharding.devices_indices_map(row["shape"])
        assert len(said) == len(slices)
        expected += len(said)
        for device, text in zip(runner.mesh.devices.flat, said, strict=True):
          ranges = [
            f"{s.start or 0}:{size if s.stop is None else s.stop}"
            for s, size in zip(slices[device], row["shape"], strict=True)
          ]
          assert text.startswith(f"Device {device.id} (")
          assert re.findall(r"\d+:\d+", text) == ranges
          others = [d.id for d in runner.mesh.devices.flat if d != device and slices[d] == slices[device]]
          assert re.findall(r"\d+", text.rpartition("So do")[2] if "So do" in text else "") == [str(d) for d in others]
  assert expected >= len(found["weights"])
  assert len(seen.value) >= len(found["weights"]) + len({a["what"] for a in found["activations"]})


@pytest.mark.parametrize("name", in_full(strategies.names(), *SHORT))
def test_the_page_of_a_strategy_has_explains_numbers(name: str):
  found, runner = golden.explained(name, None, "tokens"), golden.strategy(name)
  page = html.unescape(strategy_page.page(found, runner))
  predicted = found["memory"]["predicted"]
  numbers = [amount(predicted[part]) for part in ("parameters", "optimizer", "gradients", "total") if predicted[part]]
  numbers += [amount(found["memory"]["total"])]
  numbers += [f"{row['bytes']:,.0f}" for row in found["theory"]]
  numbers += [f"{row['sent_in_step']:,.0f}" for row in found["communication"]]
  for axes in {tuple(row["axes"]) for row in found["theory"]}:
    sent = sum(row["bytes"] for row in found["theory"] if tuple(row["axes"]) == axes)
    numbers.append(f"over {'+'.join(axes)}: by theory {amount(sent)}")
  assert [number for number in numbers if number not in page] == []
  if runner.schedule:
    for stage, ticks in enumerate(units(runner.schedule)):
      for tick, cell in enumerate(ticks):
        for kind, microbatch in cell or [("waits", "")]:
          what = {"weights": "gradients of weights"}.get(kind, kind)
          assert f'stage {stage}, tick {tick}: {what}{f", microbatch {microbatch}" if cell else ""}"' in page
    assert f"Stages wait in {found['bubble']:.1%} of the time" in page


def test_every_machine_has_a_picture_of_its_times():
  """Explain's figures of GPUs and TPUs, which need their compilers, with times, a device's memory and a host link."""
  found = dict(golden.explained("fsdp", None, "tokens"))
  time = {"compute": 2.0, "memory": 1.0, "communication": 0.5, "exposed": 0.2, "host": 0.1, "seconds": 2.2}
  found["time"] = time | {"mfu": 0.5, "palm_mfu": 0.75, "binds": "compute", "expected": 3.3}
  found["memory"] = found["memory"] | {"device": 80e9}
  page = strategy_page.page(found, golden.strategy("fsdp"))
  for expected in (
    "arithmetic: 2,000.0 ms",
    "communication: 500.0 ms",
    "the step: 2,200.0 ms",
    "3,300.0 ms",
    "what a program may use: 80.00 GB",
  ):
    assert expected in page
  assert "communication: communication, hidden 300.0 ms" in page
  assert "communication: communication, exposed 200.0 ms" in page


@pytest.fixture(scope="module")
def step() -> CompiledStep:
  return compile_step(strategy("fsdp", program()), 16)


@pytest.fixture(scope="module")
def found(step: CompiledStep) -> dict:
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(explanation, "compile_step", lambda *_: step)
    return explanation.explain("fsdp", strategy("fsdp", program()), 16)


@pytest.mark.parametrize("name", in_full(strategies.names(), *SHORT))
def test_without_compiling_everything_is_known_that_no_compiler_says(name: str, monkeypatch: pytest.MonkeyPatch):
  compiled, runner = golden.explained(name, None, "tokens"), golden.strategy(name)
  monkeypatch.setattr(explanation, "compile_step", lambda *_: pytest.fail("it compiles"))
  found = explanation.explain(name, runner, compiled["batch_size"], compiled=False)
  unknown = ("communication", "time", "compile_seconds")
  assert [found[part] for part in unknown] == [None] * len(unknown)
  same = lambda figures: {key: value for key, value in figures.items() if key not in (*unknown, "memory")}
  assert same(found) == same(compiled)
  assert found["memory"]["predicted"] == compiled["memory"]["predicted"]
  assert found["memory"]["fits"] is found["memory"]["total"] is found["memory"]["temporary"] is None


@pytest.mark.full
def test_the_bytes_of_the_weights_are_those_of_the_state(found: dict):
  state = strategy("fsdp", program()).init(seed=0)
  held = sum(shard.data.nbytes for x in jax.tree.leaves(state.params) for shard in x.addressable_shards[:1])
  assert sum(weight["bytes"] for weight in found["weights"]) == held


def test_frozen_weights_are_shown_as_they_are_stored():
  """In the dtype in which the model computes, which here has half the bytes of the weights that are trained."""
  runner = strategy("fsdp", program(model__dtype="bfloat16", **ADAPTERS))
  shown = explanation.explain("fsdp", runner, 16, compiled=False)["weights"]
  leaves = jax.tree.leaves(runner.abstract_state().params)
  held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
  assert sum(weight["bytes"] for weight in shown) == held


def test_the_activations_have_the_rows_that_devices_compute():
  """10 examples on 4 devices are 12 rows, and 16 in two parts."""
  for fields, rows in (({}, 12), ({"accumulation": 2}, 8)):
    runner = strategy("fsdp", program(**fields), devices=4)
    shown = explanation.explain("fsdp", runner, 10, compiled=False)["activations"]
    stream = next(row for row in shown if row["what"] == "residual stream")
    assert stream["shape"][0] == rows
    assert stream["bytes"] == math.prod(stream["shape"]) * 4 // 4


def test_every_pinned_activation_is_named(found: dict):
  assert {row["what"] for row in found["activations"]} == {
    "embedding table for lookup", "residual stream", "heads", "hidden units of the MLP",
  }  # fmt: skip
  heads = next(row for row in found["activations"] if row["what"] == "heads")
  assert heads["shape"] == (16, 32, 16, 4)
  assert heads["bytes"] == 16 * 32 * 16 * 4 * 4 / 8


def test_the_command_prints_all_parts_and_writes_json(
  found: dict, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
  """The page and the JSON file show all figures. Here `explain` returns figures that were compiled before."""
  given = []
  seen = lambda name, _, batch_size, where, network: given.append((name, batch_size, where, network)) or found
  monkeypatch.setattr(explain, "explain", seen)
  asked = command_line_of(
    explain.define,
    f"--config={ROOT}/configs/fsdp.py:tiny",
    "--config.compilation_cache_dir=~/.cache/meshwright/tests",
    "--config.batch_size=16",
    f"--json={tmp_path / 'new' / 'found.json'}",
    f"--html={tmp_path / 'pages' / 'found.html'}",
  )
  explain.main(asked.config, asked)
  text = capsys.readouterr().out
  assert given == [("fsdp", 16, None, None)]
  assert "\nfor 8 × cpu; batches of 16\n" in text
  parts = ("weight", "activation", "on the devices", "memory of a device", "sent in a step", "by theory")
  for part in (*parts, "optimizer (adamw, moments in float32)"):
    assert part in text
  written = json.loads((tmp_path / "new" / "found.json").read_text())
  assert written == json.loads(json.dumps(found))
  assert written["mesh"] == {"data": 8}
  assert "8 devices in a mesh of data=8" in (tmp_path / "pages" / "found.html").read_text()
  assert {"weights", "activations", "memory", "communication", "theory", "time", "bubble"} <= set(written)
  assert all(sum(row["bytes"] for row in written[part]) > 0 for part in ("weights", "activations", "theory"))


@pytest.mark.full
def test_a_pipeline_shows_its_timeline():
  runner = strategy("pipeline", program())
  text = explain.text(explanation.explain("pipeline", runner, 16), runner)
  assert timeline(runner.schedule).splitlines()[0] in text
  assert f"bubble of {runner.schedule.idle_time():.1%}" in text


@pytest.mark.full
def test_one_device_sends_nothing():
  runner = strategy("fsdp", program(), devices=1)
  assert "sends nothing" in explain.text(explanation.explain("fsdp", runner, 16), runner)


def test_every_fix_makes_the_step_fit():
  """Each fix alone is enough, and the changed config can be run."""
  case = Case.of(strategy("data_parallel", program(model__depth=4)), 64, "cpu")
  total = explanation.memory.of(case).total
  capacity = 0.7 * total
  found = explanation.fixes("data_parallel", case, capacity)
  assert found
  assert all(fix["total"] <= capacity for fix in found)
  assert any("remat=full" in fix["change"] for fix in found)
  assert any("strategy=fsdp" in fix["change"] for fix in found)
  assert not any(name in fix["change"] for fix in found for name in ("single", "pmap_ddp"))
  already = Case.of(strategy("two_d", program(model__depth=4, model__remat="full")), 64, "cpu")
  changes = [fix["change"] for fix in explanation.fixes("two_d", already, 1e12)]
  assert "mesh.data=2 mesh.model=4" in changes
  assert [change for change in changes if "remat" in change] == ["model.remat=offload"]
  assert explanation.fixes("data_parallel", case, 0) == []


def test_no_fix_has_parts_that_a_run_refuses():
  """30 examples on 8 devices are 4 rows on each, but not a multiple of 4."""
  runner = strategy("fsdp", program())
  found = explanation.fixes("fsdp", Case.of(runner, 30, "cpu"), math.inf)
  for change in (fix["change"] for fix in found):
    parts = dict(word.split("=") for word in change.split()).get("accumulation", "1")
    runner.check_batch("batch_size", 30, int(parts))


@pytest.mark.parametrize(
  "name, mesh, remat, run",
  [
    ("hsdp", {"replica": 4}, "full", {}),
    ("two_d", {"model": 4}, "minimal", {}),
    ("three_d", {"model": 4}, "full", {}),
    ("pipeline", {}, "full", {}),
    ("tensor_parallel", {}, "full", {"sequence_parallel": False}),
    ("fsdp", {}, "minimal", {"gather": "step", "accumulation": 2}),
  ],
)
def test_a_fix_gives_the_predicted_memory(name: str, mesh: dict, remat: str, run: dict):
  """The fix's fields, added to the config, make a strategy whose predicted memory is the one that the fix reports."""
  fields = {"model__depth": 4, "batch_size": 32, "model__remat": remat, **{f"mesh__{a}": n for a, n in mesh.items()}}
  asked = config(name, **fields)
  runner = strategy(name, program(**fields, **run), **{f"mesh__{a}": n for a, n in mesh.items()}, **run)
  found = explanation.fixes(name, Case.of(runner, 32, "cpu"), math.inf)
  assert len(found) > 2
  assert any(fix["change"] == "gather=part" for fix in found) == (run.get("gather") == "step")
  for fix in found:
    changes = dict(change.split("=") for change in fix["change"].split())
    assert changes, fix
    other = changes.get("strategy", name)
    sizes = {a: int(changes[f"mesh.{a}"]) for a in asked.mesh if f"mesh.{a}" in changes}
    kept = mesh if other == name else {}
    model = {"model__remat": changes.get("model.remat", remat), "model__depth": 4}
    model["optimizer__on_host"] = "optimizer.on_host" in changes
    accumulation = int(changes.get("accumulation", run.get("accumulation", 1)))
    changed = {f"mesh__{a}": n for a, n in (kept | sizes).items()} | run | {"accumulation": accumulation}
    changed |= {"gather": changes["gather"]} if "gather" in changes else {}
    made = strategy(other, program(**model, accumulation=accumulation), **changed)
    made.check_batch("batch_size", 32, accumulation)
    assert explanation.memory.of(Case.of(made, 32, "cpu")).total == fix["total"], fix


def test_fit_names_three_changes_that_fit_and_their_cost():
  """Each changed config is predicted to fit into the same memory, on GPUs that are not there."""
  fields = {"model__depth": 4, "batch_size": 64, "model__vocab_size": 0}  # the last one its data would say
  asked, size = config("data_parallel", **fields), re.compile(r"([\d.]+) MB in all, and a program may use")
  low = explain.fitting(asked, "gpu:8:1e12")  # the prediction fits, and the step did not
  needed = float(size.search(low)[1])
  smaller = [float(x) for x in re.findall(r"predicted ([\d.]+) MB", low)]
  assert len(smaller) == 3
  assert max(smaller) <= 0.9 * needed
  fit = f"gpu:8:{0.75 * needed:.2f}e6"
  text = explain.fitting(asked, fit)
  found = re.findall(r"would fit with (.+): predicted ([\d.]+) MB, (.+)\.\n", text)
  assert len(found) == 3
  for change, predicted, cost in found:
    changes = dict(field.split("=") for field in change.split())
    changed = config(changes.pop("strategy", "data_parallel"), **fields)
    changed.update_from_flattened_dict({name: {"True": True}.get(x, x) for name, x in changes.items()} | {
      name: int(x) for name, x in changes.items() if x.isdigit()
    })  # fmt: skip
    assert float(size.search(explain.fitting(changed, fit))[1]) == float(predicted) < 0.76 * needed
    assert ("more arithmetic" in cost) or change.startswith(("strategy", "optimizer"))
  assert "use more devices" in explain.fitting(asked, "gpu:8:10")


def test_the_cheapest_changes_are_of_several_kinds():
  made = lambda change, flops, sent: {"change": change, "total": 1, "flops": flops, "sent": sent, "to_host": 0}
  found = [made("a=1", 1.2, 0), made("b=1", 1, 5), made("b=2", 1, 6), made("c=1", 1, 9), made("d=1", 2, 0)]
  assert [fix["change"] for fix in cheapest(found, 3)] == ["b=1", "c=1", "a=1"]
  assert [fix["change"] for fix in cheapest(found[1:3], 3)] == ["b=1", "b=2"]


@pytest.mark.parametrize("fit", ["gpu:8", "h100:8:1e9", "gpu:0:1e9", "gpu:8:-1"])
def test_a_fit_that_is_not_valid_is_refused(fit: str):
  with one_sentence(f"fit={fit!r}", "PLATFORM:DEVICES:BYTES"):
    explain.fitting(config(), fit)


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_step_fits_into_what_a_program_may_use(beyond: int, step: CompiledStep, monkeypatch: pytest.MonkeyPatch):
  """Explain, its changes that help and its page compare with the number that the table or the backend gives."""
  seen = []
  monkeypatch.setattr(explanation, "compile_step", lambda *_: step)
  monkeypatch.setattr(explanation, "usable_memory", lambda devices: seen.append(len(devices)) or step.bytes - beyond)
  monkeypatch.setattr(
    explanation,
    "fixes",
    lambda name, case, capacity: [{"change": "x", "total": capacity, "flops": 1, "sent": 0, "to_host": 0}],
  )
  runner = strategy("fsdp", program())
  found = explanation.explain("fsdp", runner, 16)
  assert seen == [8]
  memory = found["memory"]
  assert (memory["device"], memory["fits"]) == (step.bytes - beyond, not beyond)
  assert [fix["total"] for fix in memory["fixes"]] == ([step.bytes - 1] if beyond else [])
  size = f"{(step.bytes - beyond) / 1e6:,.2f} MB"
  verdict = "does not fit" if beyond else "fits"
  assert f"The step {verdict} into the {size} of a device's memory that a program may use.\n" in explain.text(
    found, runner
  )


def test_a_refusal_of_the_compiler_holds_the_bytes():
  message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 120.50G of 95.74G hbm.\nmore"
  assert DoesNotFit(message).needed == 120.5 * 2**30
  assert (
    DoesNotFit("RESOURCE_EXHAUSTED: Used 20.5M of 16.0M vmem.").needed is None
  )  # vmem is not the memory of the device
  other = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (28.94G) exceeds available HBM (15.75G)."
  assert (DoesNotFit(other).needed, DoesNotFit(other).temporary) == (None, 28.94 * 2**30)
  assert "\n" not in str(DoesNotFit(message))


def asked_for(*arguments: str) -> tuple:
  asked = command_line_of(explain.define, f"--config={ROOT}/configs/fsdp.py:tiny", *arguments)
  return asked.config, asked


@pytest.mark.parametrize("topology", ["v5p", "v5p:", "v9:2x2", "v5p:2x2x", "8x8", "h100", "h100:8", "h100:0x8"])
def test_an_invalid_topology_is_refused(topology: str):
  with one_sentence(f"topology={topology!r}", "v5p:8x8x16", "h100:16x8"):
    explain.main(*asked_for(f"--topology={topology}"))


def test_a_network_without_gpus_or_without_a_unit_is_refused():
  with one_sentence("network='400Gb'", "is for GPUs", "--topology=h100:16x8"):
    explain.main(*asked_for("--network=400Gb"))  # this machine has CPUs
  with one_sentence("network='400Gb'", "topology='v5e:2x4'", "leave it out"):
    explain.main(*asked_for("--network=400Gb", "--topology=v5e:2x4"))
  for where in ([], ["--topology=h100:1x8"]):
    with one_sentence("network='400'", "400Gb"):
      explain.main(*asked_for("--network=400", *where))


def test_checkpoints_in_the_memory_of_hosts_are_a_row(found: dict, monkeypatch: pytest.MonkeyPatch):
  """test_memory.py compares the figure with the bytes that are kept."""
  monkeypatch.setattr(explain, "explain", lambda *_, in_hosts=False: pytest.fail(f"in_hosts={in_hosts}"))
  with pytest.raises(pytest.fail.Exception, match="in_hosts=True"):
    explain.main(*asked_for("--config.checkpoint.memory_every=5"))
  with_it, without = (explain._memory(found["memory"] | more) for more in ({"in_hosts": 2.5e6}, {}))
  assert re.search(r"\ncheckpoints in the host's memory +2\.50 MB", with_it)
  assert "checkpoints" not in without


def test_the_network_of_the_gpus_that_are_there_can_be_given(found: dict, monkeypatch: pytest.MonkeyPatch):
  """In bits for each second; the times are computed with bytes."""
  given = []
  gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
  runner = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=np.array([gpu])))
  monkeypatch.setattr(explain, "create", lambda config, where: runner)
  monkeypatch.setattr(explain, "explain", lambda *arguments: given.append(arguments[3:]) or found)
  monkeypatch.setattr(explain, "text", lambda found, strategy: "")
  explain.main(*asked_for("--network=400Gb"))
  assert given == [(None, 50e9)]


@pytest.mark.parametrize("network, is_timed", [(None, False), (5e9, True)])
def test_no_times_are_shown_if_gpus_are_in_several_slices_and_the_network_is_unknown(
  network: float | None, is_timed: bool, step: CompiledStep, monkeypatch: pytest.MonkeyPatch
):
  """Cards on PCIe. The CPU's devices stand for them, in two slices."""
  runner = strategy("fsdp", program())
  cards = hardware.chip("NVIDIA H100 PCIe")
  assert cards.network == 0
  in_slices = types.SimpleNamespace(
    devices=np.array([types.SimpleNamespace(slice_index=i // 4) for i in range(8)]), axis_names=("data",)
  )
  of_devices = lambda figures, mesh, network: links.of_devices(figures, in_slices, network)
  monkeypatch.setattr(explanation, "compile_step", lambda *_: step)
  monkeypatch.setattr(explanation, "of_devices", of_devices)
  monkeypatch.setattr(explanation, "chip", lambda kind: cards)
  monkeypatch.setattr(explanation, "peak_flops", lambda device, dtype: cards.flops)
  found = explanation.explain("fsdp", runner, 16, network=network)
  text = explain.text(found, runner)
  assert bool(found["time"]) == is_timed
  assert ("No times" in text) != is_timed
  assert ("time of the links in a step" in text) == is_timed
  assert not re.search(r"\b(inf|nan)\b", text)
  assert any("mlp" in scope for row in found["communication"] for scope in row["scopes"])
  seconds = [row["seconds"] for row in found["communication"]]
  if is_timed:  # a ring leaves a slice over four adapters
    assert sum(seconds) == pytest.approx(sum(row["sent_in_step"] for row in found["communication"]) / (4 * 5e9))
  else:
    assert set(seconds) == {None}


def test_the_page_names_the_network_of_a_cluster(found: dict):
  runner = strategy("fsdp", program())
  line = lambda network: explain.text(found | {"network": network}, runner).splitlines()[1]
  described = machine_of("h100:2x8").described
  assert line(described) == ("for 8 × cpu, each with 400 Gb/s to hosts that NVLink does not connect; batches of 16")
  assert line("") == "for 8 × cpu; batches of 16"


def test_the_page_ends_with_what_is_not_known(found: dict):
  runner = strategy("fsdp", program())
  assert found["not_known"] == ""
  assert explain.text(found | {"not_known": gpus.NOT_KNOWN}, runner).endswith(f"\n\n{gpus.NOT_KNOWN}\n")


def test_a_cluster_needs_the_gpu_compiler(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(gpus, "has_gpu_compiler", lambda: False)
  with one_sentence("topology='h100:1x8'", "pip install '.[gpu-topology]'"):
    explain.main(*asked_for("--topology=h100:1x8"))


def test_every_kind_of_device_has_plausible_figures():
  for kind, figures in hardware.CHIPS.items():
    if figures:
      assert 1e13 < figures.flops < 1e16, kind
      assert 1e10 < figures.memory < 1e12, kind
      assert 1e11 < figures.bandwidth < 1e13, kind
      assert 1e10 < figures.link < 1e12, kind
      assert (figures.torus > 0) == kind.startswith("TPU")


@pytest.mark.parametrize(
  "kind, gib, both_ways",
  [
    ("TPU v4", 30.75, 600), ("TPU v5 lite", 15.75, 400), ("TPU v5", 95.74, 1200), ("TPU v6 lite", 31.25, 800),
    ("TPU7x", 94.75, 600),  # half of a chip
  ],
)  # fmt: skip
def test_the_figures_of_tpus_are_those_of_their_compiler_and_their_maker(kind: str, gib: float, both_ways: int):
  """Memory in GiB where libtpu 0.0.42 refuses a program; GB/s over all links both ways as in Google Cloud's tables."""
  figures = hardware.chip(kind)
  assert figures.memory == gib * 2**30
  assert figures.link * 2 * 2 * figures.torus == both_ways * 1e9


def test_a_part_of_a_gpu_does_not_have_the_figures_of_the_gpu():
  assert hardware.chip("NVIDIA H200 MIG 1g.18gb") is None
  assert hardware.chip("NVIDIA A100-PCIE-40GB").link < hardware.chip("NVIDIA A100-SXM4-40GB").link


def test_without_times_the_page_says_why_and_what_to_do(found: dict):
  unknown = found | {"time": None, "device": "abacus"}
  assert explain._time(unknown) == (
    "No times: the peak speeds of 'abacus' are not known. Use --topology to see the times on TPUs or GPUs."
  )
  assert explain._time(unknown | {"device": "TPU v5"}) == (
    "No times: the peak speeds of 'TPU v5' in this precision are not known. Use model.dtype='bfloat16'."
  )
  assert explain._time(unknown | {"device": "NVIDIA L4", "network_known": False}) == (
    "No times: the bandwidth between hosts of NVIDIA L4 is not known. Use --network=400Gb."
  )


def test_the_page_shows_how_long_each_collective_is_sent_hidden_and_exposed():
  """The row that takes longest comes first, and the last row is the sum. Unknown times are not shown."""
  names = ("kind", "axes", "seconds", "exposed", "scopes")
  row = lambda *cells: dict(zip(names, cells, strict=True))
  communication = [
    row("all-reduce", ("replica", "data"), 0.002, 0.002, []),
    row("all-gather", ("data",), 0.007, 0.001, ["attention", "mlp"]),
    row("all-to-all", ("data",), 0.001, 0.0, ["x" * 50, "y" * 50]),
  ]
  lines = [line.split() for line in explain._waits({"communication": communication}).splitlines()]
  assert lines[0][-4:] == ["sent", "hidden", "exposed", "scope"]
  assert lines[2:] == [
    ["all-gather", "data", "7.0", "ms", "6.0", "ms", "1.0", "ms", "attention,", "mlp"],
    ["all-reduce", "replica+data", "2.0", "ms", "0.0", "µs", "2.0", "ms"],
    ["all-to-all", "data", "1.0", "ms", "1.0", "ms", "0.0", "µs", "x" * 50 + ",", "y" * 5 + "..."],
    ["total", "10.0", "ms", "7.0", "ms", "3.0", "ms"],
  ]
  for unknown in (None, [], [row("all-gather", ("data",), None, None, [])]):
    assert explain._waits({"communication": unknown}) == ""


def test_a_file_that_cannot_be_written_is_refused_before_compiling(tmp_path: Path):
  asked = command_line_of(explain.define, f"--config={ROOT}/configs/fsdp.py:tiny", f"--json={tmp_path}")
  with one_sentence("json=", "is a folder"):
    explain.main(asked.config, asked)


def test_a_model_folder_gives_the_sizes():
  folder = Path(__file__).parents[1] / "golden/pretrained/qwen3"
  sizes = explain.create(config("fsdp", init_from=str(folder)), None).program.sizes
  assert (sizes.width, sizes.head_dim, sizes.qk_norm, sizes.vocab_size) == (32, 8, True, 64)


DIES = """
import os, runpy, signal
from lab.analysis import explanation
explanation.compile_step = lambda *_: os.kill(os.getpid(), signal.SIGSEGV)
runpy.run_module("tools.explain", run_name="__main__")
"""


def test_a_compiler_that_dies_of_a_signal_leaves_a_sentence():
  command = [sys.executable, "-c", DIES, f"--config={ROOT}/configs/single.py:tiny"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert (done.returncode, done.stdout) == (command_line.BAD_INPUT, "")
  assert done.stderr.splitlines()[-1].startswith("error: the compiler was ended by SIGSEGV while it compiled for this")
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
  "number, says", [(signal.SIGFPE, "mistake of its own"), (signal.SIGKILL, "memory of this machine")]
)
def test_the_sentence_names_the_devices_and_what_to_try(
  number: signal.Signals, says: str, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(explain, "go_on_in_a_child", lambda: -number)
  with one_sentence(number.name, "4096 devices of v5p:16x16x16", says, "fewer devices", "hsdp"):
    explain.survive_compilers(pytest.fail, command_line_of(explain.define, "--topology=v5p:16x16x16"))


@pytest.mark.parametrize("code, status", [(0, 0), (2, 2), (-signal.SIGTERM, 143)])
def test_explain_ends_as_its_child_does(code: int, status: int, monkeypatch: pytest.MonkeyPatch):
  """Also after a signal that somebody has sent, which both have received."""
  monkeypatch.setattr(explain, "go_on_in_a_child", lambda: code)
  with pytest.raises(SystemExit) as ended:
    explain.survive_compilers(pytest.fail)
  assert ended.value.code == status
