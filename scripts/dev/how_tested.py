"""Write the numbers of docs/how-tested.md from the records of the runs that they count.

python scripts/dev/how_tested.py
"""

import json
import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PAGE = os.path.join(ROOT, "docs", "how-tested.md")
BEGIN, END = "<!-- counts -->", "<!-- end of counts -->"


def record(name):
    with open(os.path.join(ROOT, "records", name + ".json"), encoding="utf-8") as file:
        return json.load(file)


def counts():
    """The table, in Markdown."""
    env_names = [env_name for system in record("evidence").values() for env_name in system.values()]
    mutants, cases = record("mutants"), record("random-cases")
    trained = sum(case["counts"]["cases"] for case in cases if case["kind"] in ("model", "static"))
    programs, trees = record("programs"), record("accumulators")
    ran = [one for one in programs.values() if "agreement" in one]
    rows = [
        ("environments with recorded results", f"{len(env_names)}"),
        ("tests that passed in the one with the most", f"{max(env_name['passed'] for env_name in env_names):,}"),
        ("tests that failed in any of them", f"{sum(env_name['failed'] for env_name in env_names)}"),
        ("planted mistakes, and those that a test caught", f"{len(mutants)}, {sum(map(is_caught, mutants.values()))}"),
        (
            "random cases, and those that train a model",
            f"{sum(case['counts']['cases'] for case in cases):,}, {trained:,}",
        ),
        ("public programs, and those that resume to what they would have been", f"{len(ran)}, {count(ran, 'resumes')}"),
        ("public source trees that `migrate` is measured on", f"{len(trees)}"),
    ]
    return "\n| | |\n|---|---:|\n" + "".join(f"| {what} | {number} |\n" for what, number in rows)


def is_caught(mutant):
    return bool(mutant["caught"])


def count(programs, what):
    return sum(bool(one[what]) for one in programs)


def main():
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    with open(PAGE, "w", encoding="utf-8", newline="\n") as file:
        file.write(text[:begin] + counts() + text[end:])


if __name__ == "__main__":
    main()
