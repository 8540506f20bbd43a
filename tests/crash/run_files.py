"""The files of a run as docs/formats/ describes them, for tests that damage them."""
import dataclasses
import pathlib
import struct

BLOCK = 4096
FRAME = 64
HEAD = 24  # Of a record: check, key, version.
MASK = 2**64 - 1
DELETION = 1 << 63


def mix_key(key):
    x = (key + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@dataclasses.dataclass(eq=False)
class RowFile:
    """One parameter file: where its sections lie, and the key and version of each record."""
    path: pathlib.Path
    rows: int
    record_bytes: int
    entries: list
    listed_at: list = dataclasses.field(default_factory=list)  # Of each record: its entry's number in the key section.

    @property
    def keys_offset(self):
        return BLOCK + -(-self.rows * self.record_bytes // BLOCK) * BLOCK

    @property
    def padding_bytes(self):
        """Zeros between the last record and the key section; none where the records fill their blocks."""
        return self.keys_offset - self.record_offset(self.rows)

    def record_offset(self, row):
        return BLOCK + row * self.record_bytes


def read_row_file(path, rows, row_bytes):
    file = RowFile(path, rows, HEAD + -(-row_bytes // 8) * 8, [])
    data = path.read_bytes()
    listed = [struct.unpack_from("<QQ", data, file.keys_offset + 16 * i) for i in range(rows)]
    # Listed by MixKey; which record it is, an entry's version says between sequence and deletion.
    by_record = sorted((version >> 36 & 0xFFFFF, key, version & ~(0xFFFFF << 36), i)
                       for i, (key, version) in enumerate(listed))
    file.entries = [(key, version) for _, key, version, _ in by_record]
    file.listed_at = [i for _, _, _, i in by_record]
    return file


def read_manifest(path):
    """(row_bytes, [(file id, rows)]) of a manifest."""
    data = path.read_bytes()[FRAME:]
    (name,) = struct.unpack_from("<I", data, 8)
    at = 12 + name
    _, row_bytes, _, _, files = struct.unpack_from("<IIQQQ", data, at)
    at += 32
    return row_bytes, [struct.unpack_from("<QQQ", data, at + 32 * i)[::2] for i in range(files)]


def newest_number(run):
    return int(run.checkpoints()[-1].split("-")[1])


def store_folder(run, shard=0):
    return run.path / "rows" / "default" / f"shard-{shard}"


def row_files(run, shard=0, number=None):
    """The parameter files of a checkpoint's store, by id."""
    folder = store_folder(run, shard)
    row_bytes, files = read_manifest(folder / f"manifest-{number or newest_number(run):08}")
    return [read_row_file(folder / f"rows-{id:010}", rows, row_bytes) for id, rows in files]


def newest_versions(files):
    """Key to (sequence, file, row) of its newest record; deleted keys are left out."""
    newest = {}
    for file in files:
        for row, (key, version) in enumerate(file.entries):
            if key not in newest or version & ~DELETION >= newest[key][0] & ~DELETION:
                newest[key] = (version, file, row)
    return {key: found for key, found in newest.items() if not found[0] & DELETION}


def overwrite(path, offset, size=16):
    """Other bytes than were there."""
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(size)
        file.seek(offset)
        file.write(bytes(b ^ 0x5A for b in old))


def cut(path, size):
    with open(path, "r+b") as file:
        file.truncate(size)


def contents(folder):
    """Every file of a folder with its bytes."""
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "LOCK"}
