"""README and the guide: code, commands and links that exist, and generated parts that are up to date."""

import ast
import functools
import json
import re
import shlex
import sys
import tomllib
import types
from pathlib import Path
from types import ModuleType

import helpers
import pytest

import strategies
import strategies.pipeline
from configs import base
from configs.experiments import PRESETS
from lab.benchmarks import (
  checkpoint_cost,
  generation,
  growth,
  guide,
  input_pipeline,
  optimizers,
  pages,
  pipeline_schedules,
  predictions,
  preparation,
  published,
  rates,
  replica_check,
)
from lab.benchmarks.pages import ROOT
from models.remat import NAMES
from strategies.execution.stages.orders import ORDERS
from tools.benchmark import measurements

CODE = Path(strategies.__file__).parents[1]  # the root, or the package of a fork that is one package
README, COMMANDS = ROOT / "README.md", ROOT / "docs/commands.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_layouts_in_the_readme_are_the_code_of_the_strategies():
  (block,) = re.findall(r"```python\n(LAYOUT = .*?)```", README.read_text(), re.DOTALL)
  shown = [line.split("  # ") for line in block.splitlines()]
  assert [file for _, file in shown] == [f"strategies/{name}.py" for name in ("data_parallel", "fsdp", "two_d")]
  for code, file in shown:
    assert code.strip() in (ROOT / file).read_text().splitlines()


def strategies_of_the_readme() -> list[str]:
  table = README.read_text().partition("\n## The strategies\n")[2].partition("\n## ")[0]
  return re.findall(r"^\| \[`(\w+)`\]\(strategies/", table, re.MULTILINE)


def test_the_readme_lists_as_many_strategies_as_it_says():
  """A strategy of your own need not be in the table."""
  listed = strategies_of_the_readme()
  assert len(set(listed)) == len(listed) == 15
  assert set(listed) <= set(strategies.names())
  for file in ("README.md", "pyproject.toml"):
    assert "fifteen sharding strategies" in (ROOT / file).read_text()


def test_the_chart_leads_to_every_strategy_of_the_readme():
  """Except to the one without devices to choose from, and the legacy one."""
  (chart,) = re.findall(r"```mermaid\n(.*?)```", (ROOT / "docs/explain.md").read_text(), re.DOTALL)
  arrows = re.findall(r'^  (\w+) -- ".*?" --> (\w+)', chart, re.MULTILINE)
  assert len(arrows) == len(chart.splitlines()) - 2  # all lines but the first question's
  assert {end for _, end in arrows} - {"state", "links"} == set(strategies_of_the_readme()) - {"single", "pmap_ddp"}


def commands(page: Path) -> list[list[str]]:
  """The words of each Python command in a page's blocks of code."""
  blocks = re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
  lines = "\n".join(blocks).replace("\\\n", "").splitlines()
  return [shlex.split(line.removeprefix("$ "), comments=True)[1:] for line in lines if re.match(r"(\$ )?python ", line)]


def program(command: list[str]) -> tuple[Path, list[str]]:
  """The file that a command runs, and its arguments. For tools.launch: train.py, to which it gives them."""
  if "--" in command:
    return ROOT / "train.py", command[command.index("--") + 1 :]
  if command[:2] == ["-m", "tools.benchmark"] and len(command) > 2:
    return ROOT / (measurements()[command[2]][0].replace(".", "/") + ".py"), command[3:]
  if command[0] == "-m":
    return ROOT / (command[1].replace(".", "/") + ".py"), command[2:]
  return ROOT / command[0], command[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_programs_and_flags_of_a_pages_commands_exist(page: Path):
  fields, shown = base.get_config().to_dict(), page.read_text()
  for command in commands(page):
    file, arguments = program(command)
    assert file.exists() or f"# {file.name}" in shown, command
    defining = [each.read_text() for each in (file, file.with_name("options.py")) if each.exists()]
    for flag, _, value in (word.strip("[]").partition("=") for word in arguments if word.lstrip("[").startswith("--")):
      path = flag.removeprefix("--config.").removeprefix("--").split(".")
      if flag == "--config":
        config, _, preset = value.partition(":")
        assert (ROOT / config).exists(), command
        assert not preset or preset in PRESETS, command
      elif flag.startswith("--config.") or len(path) > 1:
        assert path[0] in fields, command
        assert len(path) == 1 or path[0] == "mesh" or path[1] in fields[path[0]], command
      else:
        assert re.search(rf'"(--)?{path[0].replace("-", "[-_]")}"', "".join(defining)), command


def test_every_tool_is_on_the_page_of_commands():
  named = {program(command[:2])[0].stem for command in commands(COMMANDS)}
  tools = {file.stem for file in (ROOT / "tools").glob("*.py") if "__main__" in file.read_text()}
  assert tools <= named
  assert not [page for page in [*PAGES, ROOT / "WORKSPACE.md"] if "-m benchmarks" in page.read_text()], "their old name"


def test_the_pipeline_page_shows_the_schedules_and_the_record():
  record = json.loads(pipeline_schedules.RECORD.read_text())
  page = pipeline_schedules.PAGE.read_text()
  assert pages.fill(page, pipeline_schedules.tables(record)) == page
  assert "stage 3" in page


def test_the_pipeline_docstring_quotes_the_record():
  text = " ".join(strategies.pipeline.__doc__.split())
  rows = pipeline_schedules.tables(json.loads(pipeline_schedules.RECORD.read_text()))["speed"].splitlines()
  ratios = {cells[1].strip(): cells[-2].strip() for cells in (row.split("|") for row in rows) if len(cells) > 2}
  for name in ORDERS:
    assert f"{name} {ratios[name]}" in text


@pytest.mark.parametrize(
  "benchmark", [checkpoint_cost, generation, growth, input_pipeline, optimizers, preparation, replica_check]
)
def test_a_page_shows_its_benchmarks_record(benchmark: ModuleType):
  page = benchmark.PAGE.read_text()
  assert pages.fill(page, benchmark.tables(json.loads(benchmark.RECORD.read_text()))) == page


def test_muon_is_better_than_adamw_from_every_seed():
  """With rates that are best inside the grid, not at its ends."""
  record = json.loads(optimizers.RECORD.read_text())
  assert max(optimizers.seeds(record, "muon")) < min(optimizers.seeds(record, "adamw"))
  for name in optimizers.NAMES:
    assert len(optimizers.seeds(record, name)) == len(optimizers.SEEDS) == 3
    assert record["losses"][name][-1]["rate"] in optimizers.RATES[1:-1]


# The field's names, each beside ours, and the pages on which somebody would look for it.
COMMON = {
  "activation checkpointing": ["questions"],
  "arithmetic intensity": ["choosing-sizes", "questions"],
  "async dispatch": ["debugging", "profile", "questions"],
  "collective matmul": ["glossary", "thousand-chips"],
  "CPU offload": ["memory"],
  "DCN": ["cluster", "glossary", "strategies", "thousand-chips"],
  "deadlock": ["cluster"],
  "early stopping": ["checkpoints", "commands"],
  "FP8": ["float8"],
  "gradient accumulation": ["commands", "explain", "glossary", "memory", "strategies"],
  "gradient checkpointing": ["memory"],
  "gradient clipping": ["optimizers"],
  "latency hiding": ["glossary", "thousand-chips"],
  "logical ax": ["fork", "glossary", "strategies"],  # axis or axes
  "master weights": ["glossary", "optimizers"],
  "microbatch": ["glossary", "pipeline"],
  "mixed precision": ["commands", "glossary", "memory", "optimizers"],
  "experts (MoE": ["experts", "glossary"],
  "multi-host": ["cluster", "commands", "glossary"],
  "multi-node": ["cluster"],
  "multi-slice": ["choosing-sizes", "cluster", "glossary", "strategies", "thousand-chips"],
  "NCCL": ["cluster"],
  "out of memory": ["memory"],
  "recompile": ["data"],
  "RESOURCE_EXHAUSTED": ["memory"],
  "ring attention": ["glossary", "long-text"],
  "roofline": ["explain", "glossary", "profile", "thousand-chips"],
  "sequence packing": ["data"],
  "shard_map": ["explain", "glossary"],
  "Ulysses": ["glossary", "long-text"],
  "W&B": ["cluster"],
  "ZeRO-1": ["strategies"],
  "ZeRO-2": ["strategies"],
  "ZeRO-3": ["glossary", "strategies"],
}


@pytest.mark.parametrize("name", COMMON)
def test_common_names_stand_beside_ours(name: str):
  for page in COMMON[name]:
    assert name.lower() in " ".join((ROOT / f"docs/{page}.md").read_text().lower().split()), page


def test_the_memory_page_lists_the_names_of_values():
  table = (ROOT / "docs/memory.md").read_text().partition("| Name | Value |")[2].partition("\n\n")[0]
  rows = [row.split("|")[1] for row in table.splitlines()[2:]]
  assert re.findall(r"`(\w+)`", " ".join(rows)) == list(NAMES)


@pytest.mark.full
@pytest.mark.parametrize("platform", predictions.RECORDS)
def test_pages_show_the_predictions(platform: str):
  record = json.loads(predictions.RECORDS[platform].read_text())
  for page, made in ((predictions.PAGE, predictions.tables), (predictions.LARGE_PAGE, predictions.large)):
    assert pages.fill(page.read_text(), made(record)) == page.read_text()


@pytest.mark.full
def test_the_explain_page_shows_published_speeds():
  page = predictions.PAGE.read_text()
  assert pages.fill(page, rates.tables(json.loads(rates.RECORD.read_text()))) == page
  assert pages.fill(page, {"ways": published.ways(json.loads(published.RECORD.read_text()))}) == page


@pytest.mark.parametrize("page", guide.PAGES, ids=lambda page: page.name)
def test_a_page_of_strategies_shows_uses_the_golden_pages_and_the_records(page: Path):
  made = guide.parts(page)
  assert len(made) >= 2
  assert pages.fill(page.read_text(), made) == page.read_text()


def test_every_strategy_of_the_readme_is_on_one_page():
  placed = [name for page in guide.PAGES for name in re.findall(r"<!-- (\w+) -->", page.read_text())]
  assert sorted(set(placed) - {"machine", "end"}) == sorted(strategies_of_the_readme())


def test_when_to_use_a_strategy_is_written_in_its_docstring_alone():
  """README shows the first sentence of it. `python -m tools.benchmark guide` writes README."""
  for name in strategies_of_the_readme():
    assert re.match(r"Use it .+?[.:] .*Don't use it ", guide.use(name)), name
  assert guide.with_uses(README.read_text()) == README.read_text()


@pytest.mark.full
def test_the_commands_page_shows_the_sizes_of_the_presets():
  page = COMMANDS.read_text()
  assert pages.fill(page, {"presets": guide.presets()}) == page
  assert {*guide.SIZED, "images", "finetune", "lora"} == set(PRESETS)


def test_the_citation_is_of_this_version():
  cited = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert (cited["version"], cited["license"]) == (project["version"], project["license"])
  assert {"cff-version", "message", "title", "type"} <= set(cited)


def test_a_step_of_fsdp_is_followed_in_ten_files():
  """The step runs the ten files that WORKSPACE.md lists and the helpers that it names, and no other.

  No lower layer calls a higher one, but the model calls the constraints that it was given, with what they use.
  """
  walk = (ROOT / "WORKSPACE.md").read_text().partition("\n**One step of FSDP, in ten files.**")[2].partition("\n| ")[0]
  listed = re.findall(r"^\d+\. `([\w/]+\.py)`: ", walk, re.MULTILINE)
  skipped = re.findall(r"`([\w/]+\.py)`", walk.partition("helpers")[2])
  assert len(set(listed)) == 10
  assert len({*listed, *skipped}) == len(listed) + len(skipped)
  layers = ["strategies", "training", "models"]  # from the top
  called: list[tuple[str, str]] = []  # files of these layers: caller, callee

  @functools.cache
  def ours(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if any(path.is_relative_to(CODE / name) for name in layers) else ""

  def record(frame: types.FrameType, event: str, _: object) -> None:
    if event == "call" and (callee := ours(frame.f_code.co_filename)):
      caller = frame.f_back
      while caller and not ours(caller.f_code.co_filename):
        caller = caller.f_back
      called.append((ours(caller.f_code.co_filename) if caller else "", callee))

  strategy = helpers.strategy("fsdp", helpers.program())
  sys.setprofile(record)
  try:
    strategy.lower_train_step(16)
  finally:
    sys.setprofile(None)
  assert listed[0] == "train.py"
  assert {*listed[1:], *skipped} == {callee for _, callee in called}
  layer = lambda file: layers.index(file.removeprefix(f"{CODE.name}/").split("/")[0])
  up = {(a, b) for a, b in called if a and layer(b) < layer(a)}
  assert {b for _, b in up} <= {
    "strategies/execution/constraints.py",
    "strategies/execution/collectives.py",
    "strategies/layout.py",
  }


def test_the_table_of_promises_names_tests_of_make_test():
  named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (ROOT / "tests/README.md").read_text())
  assert len(named) > 20
  for file, test in named:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if test:
      assert test in functions, f"{file}::{test}"
      assert "pytest.mark.full" not in map(ast.unparse, functions[test].decorator_list), f"{file}::{test}"


@pytest.mark.parametrize("page", [ROOT / "WORKSPACE.md", *PAGES, ROOT / "tests/README.md"], ids=lambda page: page.name)
def test_the_files_of_code_that_a_page_names_exist(page: Path):
  """By their whole path or the end of it. Names in capital letters stand for any file."""
  rooms = (path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
  files = [f"/{file.relative_to(ROOT)}" for file in (*ROOT.glob("*.py"), *(f for r in rooms for f in r.rglob("*.py")))]
  named = set(re.findall(r"`((?:[\w.-]+/)*\w+\.py)`", page.read_text()))
  assert not [name for name in named if not name[-4].isupper() and not any(f.endswith(f"/{name}") for f in files)]
