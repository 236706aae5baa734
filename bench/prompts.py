"""Sixteen prompts written for this project: real tasks of four kinds, for tests that run offline.
They stand in for no benchmark.
"""

_HARBOUR = """\
The fishing town of Skerry Point has voted to keep its old harbour crane, ending a dispute that had divided the council for two years. \
The crane, built in 1911 to lift coal from steam colliers, has not moved since 1974, and engineers warned in March that its northern leg \
had rusted through in three places. A developer had offered to pay for its removal and to build forty flats with a hotel on the quay. \
Supporters of the plan said that the town had lost a third of its young people since the cannery closed and could not afford to turn work \
away. Opponents collected four thousand signatures, more than the number of people who live there, and pointed out that the crane is \
the only one of its kind left on the coast. On Tuesday evening, after a meeting that lasted six hours, the council rejected the offer by \
seven votes to five. The town will borrow 1.2 million pounds to repair the leg and to open a small museum in the engine house. The mayor, \
Ruth Calder, who cast the deciding vote, said that she had changed her mind after walking under the crane with her grandson. "He asked me \
who made it," she said, "and I knew the name." The developer said that it would look for another site further south. Work on the repair \
is to begin in May and should take eighteen months."""

_BATTERIES = """\
Researchers at a small university in northern Sweden have shown that old car batteries can keep a village supplied with heat through a \
winter. The team collected 212 worn battery packs, each with about two thirds of its first capacity, and stacked them in a former dairy. \
The packs are charged at night, when wind power is plentiful and cheap, and drive heat pumps during the day. Over five months the store \
met 71 per cent of the heating needs of 340 households, at a cost a quarter below that of the oil boilers it replaced. Two packs failed, \
neither of them dangerously, and were exchanged within an hour. The hardest part, according to the project's leader, was not chemistry but \
paperwork: every maker labels its packs in another way, and the history of most of them had been lost. The team therefore wrote a short \
test that grades a pack in nine minutes, and has published it for anyone to use. Critics note that the winter was mild and that the store \
was never asked to run for more than three cold and windless days in a row. A second winter, with 500 packs and a larger tank of hot water \
as a reserve, is planned. If it succeeds, six neighbouring villages want to follow."""

_LIBRARY = """\
CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT, author_id INTEGER, published_year INTEGER, pages INTEGER);
CREATE TABLE authors (id INTEGER PRIMARY KEY, name TEXT, country TEXT, born INTEGER);
CREATE TABLE loans (id INTEGER PRIMARY KEY, book_id INTEGER, member_id INTEGER, loaned_on DATE, returned_on DATE);
CREATE TABLE members (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined_on DATE);"""

_SHOP = """\
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, signed_up DATE);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, placed_on DATE, total NUMERIC, status TEXT);
CREATE TABLE order_items (order_id INTEGER, product_id INTEGER, quantity INTEGER, price NUMERIC);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, stock INTEGER);"""

_MERGE = '''\
def merge_intervals(intervals):
    """Merge overlapping [start, end] intervals."""
    result = []
    for start, end in intervals:
        if result and start <= result[-1][1]:
            result[-1][1] = end
        else:
            result.append([start, end])
    return result'''

_COUNTER = """\
class RateLimiter:
    def __init__(self, limit, period):
        self.limit = limit
        self.period = period
        self.calls = []

    def allow(self, now):
        self.calls = [t for t in self.calls if now - t < self.period]
        if len(self.calls) < self.limit:
            self.calls.append(now)
            return True
        return False"""

PROMPTS = {
    "chat": (
        "What should I pack for a three-day walk in the mountains in October?",
        "Explain to a ten-year-old why the sky is blue and sunsets are red.",
        "Write a polite e-mail to my landlord, Mr Okafor, asking him to repair the kitchen tap "
        "that has been dripping for two weeks.",
        "I have eggs, spinach, half an onion and some old bread. Suggest a dinner and tell me "
        "how to cook it.",
    ),
    "summarise": (
        f"Summarise the following article in three sentences.\n\n{_HARBOUR}",
        f"{_HARBOUR}\n\nWho gained and who lost by the decision described above?",
        f"Summarise the following article in three sentences.\n\n{_BATTERIES}",
        f"{_BATTERIES}\n\nList the five most important facts of this article.",
    ),
    "sql": (
        f"{_LIBRARY}\n\nWrite a SQL query: the titles of all books published before 1950 by "
        f"authors from Norway.",
        f"{_LIBRARY}\n\nQuestion: Which ten members have borrowed the most books since 2020?\nSQL:",
        f"{_SHOP}\n\nWrite a SQL query: the total revenue of each product category in 2023, "
        f"highest first.",
        f"{_SHOP}\n\nQuestion: Which customers from Leeds have never placed an order?\nSQL:",
    ),
    "code": (
        f"This function is wrong when the intervals are not sorted or one contains another. "
        f"Correct it.\n\n{_MERGE}",
        f"Add type hints and docstrings to this class and repeat it in full.\n\n{_COUNTER}",
        "Write a Python function that returns the n-th row of Pascal's triangle as a list of "
        "integers.",
        "Write a Python function that reads a CSV file with the columns name and score and "
        "returns the three best names.",
    ),
}
"""Prompts by workload: the user's message of a chat, or raw text as it stands."""
