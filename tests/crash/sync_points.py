"""The named moments of the program, by its source."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SOURCES = ROOT / "src" / "terrace"
HIT = re.compile(r'SyncPoint::Hit\(\s*"([^"]+)"\)')


def points_of(pattern):
    """The points that files of that pattern below src/terrace pass."""
    return {name for path in SOURCES.glob(pattern) if not path.name.endswith("_test.cc") for name in HIT.findall(path.read_text())}


# Which test kills at them: each point of the program is one of these.
TRAINER = points_of("train/training_*.cc")
REPAIR = {name for name in points_of("**/*.cc") if name.startswith("repair.")}
STORAGE = points_of("io/*.cc") | points_of("store/*.cc") | points_of("cache/*.cc") | points_of("train/run_folder*.cc")
ROW_LIFE = {"checkpoint.before_filter"}  # tests/lossless/test_row_life.py
UNIT = {"quota.rewrite.waits"}  # src/terrace/store/store_quota_test.cc: nothing is written there.
HARNESS = STORAGE - REPAIR - ROW_LIFE - UNIT
BY_KEY = points_of("store/store_sweep.cc")  # An index by group sweeps within its writes.
ALL = points_of("**/*.cc") | points_of("**/*.h")
