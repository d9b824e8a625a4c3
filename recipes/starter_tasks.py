"""Eight small functions to write, made for this repository; data only."""

from recipes.function_task import FunctionTask

LONGEST_RUN = FunctionTask(
    name="longest_run",
    entry_point="longest_run",
    spec='''\
def longest_run(text: str) -> int:
    """Return the length of the longest run of one repeated character in text.

    >>> longest_run("abbbcc")
    3
    >>> longest_run("")
    0
    """
''',
    tests="""\
def check(candidate):
    assert candidate("") == 0
    assert candidate("a") == 1
    assert candidate("abbbcc") == 3
    assert candidate("aabbbb") == 4
    assert candidate("abab") == 1
    assert candidate("    x") == 4
""",
)

INITIALS = FunctionTask(
    name="initials",
    entry_point="initials",
    spec='''\
def initials(name: str) -> str:
    """Return the upper-case first letter of each word of name, each followed by a full stop.

    >>> initials("ada king lovelace")
    'A.K.L.'
    >>> initials("Grace  Hopper")
    'G.H.'
    """
''',
    tests="""\
def check(candidate):
    assert candidate("ada king lovelace") == "A.K.L."
    assert candidate("Grace  Hopper") == "G.H."
    assert candidate(" plato ") == "P."
    assert candidate("") == ""
""",
)

SPREAD_OUT = FunctionTask(
    name="spread_out",
    entry_point="spread_out",
    spec='''\
def spread_out(numbers: list[int], gap: int) -> list[int]:
    """Go through numbers in order and keep the first one and every later one that differs by
    at least gap from the number kept last.

    >>> spread_out([1, 2, 4, 5, 9], 3)
    [1, 4, 9]
    >>> spread_out([5, 1, 2], 4)
    [5, 1]
    """
''',
    tests="""\
def check(candidate):
    assert candidate([], 2) == []
    assert candidate([1, 2, 4, 5, 9], 3) == [1, 4, 9]
    assert candidate([5, 1, 2], 4) == [5, 1]
    assert candidate([7, 7, 7], 0) == [7, 7, 7]
    assert candidate([0, 1, 2, 3, 4], 2) == [0, 2, 4]
""",
)

BALANCE_POINT = FunctionTask(
    name="balance_point",
    entry_point="balance_point",
    spec='''\
def balance_point(weights: list[int]) -> int:
    """Return the smallest index i for which the sum of the weights before i equals the sum of
    the weights after i, or -1 if there is none.

    >>> balance_point([2, 3, 9, 4, 1])
    2
    >>> balance_point([1, 2])
    -1
    """
''',
    tests="""\
def check(candidate):
    assert candidate([2, 3, 9, 4, 1]) == 2
    assert candidate([1, 2]) == -1
    assert candidate([]) == -1
    assert candidate([5]) == 0
    assert candidate([0, 0, 0]) == 0
    assert candidate([3, -1, 1]) == 0
    assert candidate([1, 1, 2]) == -1
    assert candidate([1, -1, 8]) == 2
""",
)

TOTAL_TIME = FunctionTask(
    name="total_time",
    entry_point="total_time",
    spec='''\
def total_time(laps: list[str]) -> str:
    """Add lap times written as "minutes:seconds" and return the sum in the same form, the
    seconds with two digits.

    >>> total_time(["1:30", "0:45"])
    '2:15'
    >>> total_time([])
    '0:00'
    """
''',
    tests="""\
def check(candidate):
    assert candidate([]) == "0:00"
    assert candidate(["1:30", "0:45"]) == "2:15"
    assert candidate(["0:05"]) == "0:05"
    assert candidate(["59:59", "0:01"]) == "60:00"
    assert candidate(["70:10", "2:55"]) == "73:05"
""",
)

FILL_ORDERS = FunctionTask(
    name="fill_orders",
    entry_point="fill_orders",
    spec='''\
def fill_orders(stock: dict[str, int], orders: list[tuple[str, int]]) -> dict[str, int]:
    """Fill each order (item, count) in turn, skip an order that the remaining stock cannot
    fill whole, and return what is left of every item. The argument stock is not changed.

    >>> fill_orders({"pen": 3, "cup": 1}, [("pen", 2), ("pen", 2), ("cup", 1)])
    {'pen': 1, 'cup': 0}
    >>> fill_orders({"pen": 3}, [("hat", 1)])
    {'pen': 3}
    """
''',
    tests="""\
def check(candidate):
    stock = {"pen": 3, "cup": 1}
    assert candidate(stock, [("pen", 2), ("pen", 2), ("cup", 1)]) == {"pen": 1, "cup": 0}
    assert stock == {"pen": 3, "cup": 1}
    assert candidate({"pen": 3}, [("hat", 1)]) == {"pen": 3}
    assert candidate({"pen": 3}, [("pen", 4), ("pen", 3)]) == {"pen": 0}
    assert candidate({}, []) == {}
""",
)

SNAKE_ROWS = FunctionTask(
    name="snake_rows",
    entry_point="snake_rows",
    spec='''\
def snake_rows(items: list[int], width: int) -> list[list[int]]:
    """Split items into rows of width (the last row may be shorter) and reverse every second
    row, starting with the second.

    >>> snake_rows([1, 2, 3, 4, 5, 6, 7], 3)
    [[1, 2, 3], [6, 5, 4], [7]]
    """
''',
    tests="""\
def check(candidate):
    assert candidate([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [6, 5, 4], [7]]
    assert candidate([1, 2, 3, 4, 5], 3) == [[1, 2, 3], [5, 4]]
    assert candidate([], 2) == []
    assert candidate([1, 2, 3], 1) == [[1], [2], [3]]
    assert candidate([1, 2], 5) == [[1, 2]]
""",
)

ONLY_ONCE = FunctionTask(
    name="only_once",
    entry_point="only_once",
    spec='''\
def only_once(text: str) -> list[str]:
    """Return the words of text that occur in it exactly once, ignoring upper and lower case,
    in lower case and in order of appearance. Words are separated by spaces.

    >>> only_once("The cat saw the dog")
    ['cat', 'saw', 'dog']
    """
''',
    tests="""\
def check(candidate):
    assert candidate("The cat saw the dog") == ["cat", "saw", "dog"]
    assert candidate("") == []
    assert candidate("a A a") == []
    assert candidate("b a B c") == ["a", "c"]
    assert candidate("One") == ["one"]
""",
)

STARTER_TASKS = (
    LONGEST_RUN,
    INITIALS,
    SPREAD_OUT,
    BALANCE_POINT,
    TOTAL_TIME,
    FILL_ORDERS,
    SNAKE_ROWS,
    ONLY_ONCE,
)
