"""The same small table as CSV, TSV, JSON array, JSON lines and parquet."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

KINDS = ("csv", "tsv", "json", "jsonl", "parquet")


def save(folder, rows, kind):
    """Rows of plain values as a file; in CSV lists and objects are JSON, null is no cell, and every text stands in quotes."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"mine.{kind}"
    names = list(dict.fromkeys(name for row in rows for name in row))
    if kind == "json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    elif kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), file)
    else:
        sign = "," if kind == "csv" else "\t"
        with file.open("w", newline="", encoding="utf-8") as stream:
            lines = [sign.join(_cell(name) for name in names)]
            lines += [sign.join(_cell(row.get(name)) for name in names) for row in rows]
            stream.write("\n".join(lines) + "\n")
    return file


def _cell(value):
    if value is None:
        return ""
    if isinstance(value, (list, dict)):
        value = json.dumps(value)
    return f'"{value.replace(chr(34), chr(34) * 2)}"' if isinstance(value, str) else str(value)
