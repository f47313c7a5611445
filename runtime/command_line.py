"""`--config=FILE[:PRESET] --config.FIELD=VALUE`: ml_collections' flags, with errors that a user can act on."""

import atexit
import codecs
import contextlib
import functools
import gc
import importlib.util
import locale
import os
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from errors import FIXES, ConfigError, Unavailable, did_you_mean, first_line, may_pass, of_file, visible
from runtime.first_process import leave_to_a_child
from runtime.stderr import visible_streams
from runtime.storage.answers import StorageError

# Exit statuses: docs/cluster.md says what they mean. After the last two, another start would fail in the same way.
FAILED, BAD_INPUT, DIVERGED = 1, 2, 3
INTERRUPTED = 130  # by SIGINT, as shells count
SECONDS_TO_END = 3.0  # for the threads of libraries, after the program's own end


def define_config(into: flags.FlagValues = flags.FLAGS) -> flags.FlagHolder:
  """Defines `--config`. configs/base.py locks the config, except that its section `mesh` accepts new fields."""
  text = "configs/STRATEGY.py[:PRESET], a Python file, which is run; change a field with --config.FIELD=VALUE"
  new = {"lock_config": False, "accept_new_attributes": True}
  return config_flags.DEFINE_config_file("config", None, text, flag_values=into, **new)


CONFIG = define_config()


def use_utf8() -> None:
  """Starts the program again in Python's UTF-8 mode if the locale has another encoding.

  All text here is UTF-8: what is read, written and printed. An ASCII locale could not even print a mesh, for its ×.
  """
  asked = os.environ.get("PYTHONUTF8") == "1"  # and refused, by `-X utf8=0`
  if not sys.flags.utf8_mode and not asked and codecs.lookup(locale.getencoding()).name != "utf-8":
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONUTF8": "1"})


def use_a_home() -> None:
  """Gives a user without a home a private one for caches: in a container, a user may have neither an entry nor HOME."""
  if os.path.expanduser("~") != "~":
    return
  made = ""
  with contextlib.suppress(OSError):  # nothing can be written: what needs a cache says so
    made = os.path.join(tempfile.gettempdir(), f"meshwright-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
      os.mkdir(made, 0o700)
    found = os.lstat(made)
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
      made = tempfile.mkdtemp(prefix="meshwright-")  # the other is a stranger's
  if made:
    os.environ["HOME"] = made
    print(f"note: this user has no home, so caches are in {made}; set HOME to keep them", file=sys.stderr, flush=True)


def open_streams() -> None:
  """Opens closed standard streams (`2>&-`). The next file opened would take their number, and get what is printed."""
  while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
    pass
  os.close(descriptor)
  sys.stdout = sys.stdout or os.fdopen(1, "w")
  sys.stderr = sys.stderr or os.fdopen(2, "w")


@contextlib.contextmanager
def bad_input_ends_the_program() -> Iterator[None]:
  """Ends the program with one line if the body raises ConfigError, or an error of storage or of the machine's files.

  What the body prints is shown as text, whoever has written it (errors.visible).
  """
  use_utf8()
  open_streams()
  use_a_home()
  with visible_streams():
    try:
      yield
    except (ConfigError, Unavailable, StorageError) as error:
      fail(error, status=FAILED if may_pass(error) else BAD_INPUT)
    except OSError as error:
      if error.errno not in FIXES:
        raise  # a mistake of the program, which its traceback shows
      fail(type(error)(of_file(error, "", "used")), status=FAILED if may_pass(error) else BAD_INPUT)


def run(main: Callable[[Any], None], needs_config: bool = True) -> NoReturn:
  """Runs `main(config)` with the config of the command line, or None if none is given and none is needed.

  A ConfigError becomes one line on standard error and exit status 2, an Unavailable the same with status 1. If one
  process of several fails alone, it ends at once: the others wait for it, and so nobody would see that it has failed.
  """

  def reporting(_: list[str]) -> None:
    try:
      with bad_input_ends_the_program():
        main(CONFIG.value)
    except (Exception, KeyboardInterrupt) as error:
      from runtime import processes

      if not processes.failed_alone(error):
        raise
      sys.excepthook(type(error), error, error.__traceback__)  # which shows foreign text as text
      processes.end_at_once(FAILED)

  use_utf8()
  open_streams()
  use_a_home()
  logging.set_verbosity(logging.WARNING)  # hides libraries' notes, such as which accelerators were not found
  gc.freeze()  # nothing that imports have made becomes garbage: looking for it takes a tenth of a short run
  status = FAILED
  leave_to_a_child()
  try:
    app.run(reporting, flags_parser=functools.partial(parse, needs_config=needs_config))
  except KeyboardInterrupt:
    status = INTERRUPTED
    raise
  except SystemExit as ended:
    status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    raise
  finally:
    gc.freeze()  # nor need Python look through all that is left at its end
    end_in_time(status)


def end_in_time(status: int) -> None:
  """Lets the program end with this status even if threads of libraries do not end, as Python would wait for them.

  After a save that has failed, threads of orbax wait 300 s for signals that never come.
  """
  ended = threading.Event()
  atexit.register(ended.set)  # which Python calls when the threads have ended

  def watch() -> None:
    threading.main_thread().join()  # whoever has called `run` may go on, as a test does
    if not ended.wait(SECONDS_TO_END):
      atexit._run_exitfuncs()  # of JAX, too: the processes of a job end together
      with contextlib.suppress(OSError, ValueError):  # nobody may read them any more
        sys.stdout.flush()
        sys.stderr.flush()
      os._exit(status)

  threading.Thread(target=watch, daemon=True).start()


def fail(error: Exception, status: int, advice: Callable[[], str] = str) -> NoReturn:
  """Ends the program with one line on standard error; at once if other processes may be waiting for this one.

  Args:
    advice: makes what is printed after that line, and may take a while.
  """
  print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
  if text := advice():
    print(visible(text, "\n"), file=sys.stderr)
  from runtime import processes  # after the message, which needs no JAX

  if processes.failed_alone(error):
    processes.end_at_once(status)
  sys.exit(status)


def load_config(argument: str) -> ConfigDict:
  """The config of "FILE[:PRESET]", a Python file, which is run.

  Raises ConfigError if there is no such file or preset, or if the file is wrong.
  """
  name, colon, preset = argument.partition(":")
  path = Path(name)
  if not path.is_file():
    known = [str(f) for f in path.parent.glob("*.py") if f.stem not in ("__init__", "base")]
    raise ConfigError(f"config={name!r} does not exist{did_you_mean(name, known) if known else ''}")
  spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
  if spec is None or spec.loader is None:
    raise ConfigError(f"config={name!r} is not a Python file; use a strategy's config, such as configs/fsdp.py")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    config = module.get_config(preset) if colon else module.get_config()
  except ConfigError:
    raise
  except Exception as error:  # whatever a user's own file may raise
    at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    place = f", line {at[-1]}" if at else ""
    raise ConfigError(
      f"config={name!r} cannot be used ({type(error).__name__}: {first_line(error)}{place}); correct that file"
    ) from error
  if not isinstance(config, ConfigDict):
    raise ConfigError(
      f"config={name!r} gives a {type(config).__name__}; return the config of configs.base.get_config()"
    )
  return config


def field_names(config: ConfigDict, prefix: str = "") -> Iterator[str]:
  """The dotted names of all fields."""
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      yield from field_names(value, f"{prefix}{name}.")
    else:
      yield prefix + name


def parse(argv: list[str], needs_config: bool = True) -> list[str]:
  """Parses the command line. A mistake ends the program with one line and status 2."""
  try:
    _check(argv[1:], needs_config)
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise ConfigError(f"argument {rest[1]!r} is not understood; fields are given as --config.FIELD=VALUE")
    return rest
  except (ConfigError, flags.Error) as error:
    fail(error, status=BAD_INPUT)


def _check(arguments: list[str], needs_config: bool) -> None:
  """Raises ConfigError for a missing or unknown config, and for fields that the config does not have."""
  if any(argument.lstrip("-") in ("help", "helpfull", "helpshort", "h", "?") for argument in arguments):
    return
  given = dict(argument.lstrip("-").partition("=")[::2] for argument in arguments if argument.startswith("-"))
  if not given.get("config") and not needs_config:
    return
  if not given.get("config"):
    raise ConfigError("config is missing; name one with --config=configs/fsdp.py")
  known = list(field_names(load_config(given["config"])))
  for name in (name.removeprefix("config.") for name in given if name.startswith("config.")):
    section, _, axis = name.partition(".")
    if name in known:
      continue
    if section != "mesh" or not axis.isidentifier():
      raise ConfigError(f"config.{name} is not a field{did_you_mean(name, known)}")
    if not given[f"config.{name}"].removeprefix("-").isdigit():  # the size of a mesh axis that a layout adds
      size = given[f"config.{name}"]
      raise ConfigError(f"{name}={size!r} is not a size; use a number, as in --config.{name}=2")
