"""Functions for the starter tasks: right ones, and what makes each of them wrong in a small way."""

RIGHT = {
    "longest_run": """
from itertools import groupby

def longest_run(text):
    return max((len(list(run)) for _, run in groupby(text)), default=0)
""",
    "initials": """
def initials(name):
    return "".join(word[0].upper() + "." for word in name.split())
""",
    "spread_out": """
def spread_out(numbers, gap):
    kept = []
    for number in numbers:
        if not kept or abs(number - kept[-1]) >= gap:
            kept.append(number)
    return kept
""",
    "balance_point": """
def balance_point(weights):
    for i in range(len(weights)):
        if sum(weights[:i]) == sum(weights[i + 1:]):
            return i
    return -1
""",
    "total_time": """
def seconds(lap):
    minutes, rest = lap.split(":")
    return int(minutes) * 60 + int(rest)

def total_time(laps):
    total = sum(map(seconds, laps))
    return f"{total // 60}:{total % 60:02d}"
""",
    "fill_orders": """
def fill_orders(stock, orders):
    left = dict(stock)
    for item, count in orders:
        if left.get(item, 0) >= count:
            left[item] -= count
    return left
""",
    "snake_rows": """
def snake_rows(items, width):
    rows = [items[i:i + width] for i in range(0, len(items), width)]
    return [row[::-1] if i % 2 else row for i, row in enumerate(rows)]
""",
    "only_once": """
def only_once(text):
    words = text.lower().split()
    return [word for word in words if words.count(word) == 1]
""",
}

SUBTLY_WRONG = {
    "longest_run": ("default=0", "default=1"),
    "initials": ("name.split()", 'name.split(" ")'),
    "spread_out": ("abs(number - kept[-1])", "number - kept[-1]"),
    "balance_point": ("sum(weights[:i])", "sum(weights[:i + 1])"),
    "total_time": (":02d", ""),
    "fill_orders": ("dict(stock)", "stock"),
    "snake_rows": ("i % 2", "not i % 2"),
    "only_once": ("text.lower()", "text"),
}
