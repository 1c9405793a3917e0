"""Requests to a database and the SQL that answers them, by templates."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lorry.demo.questions import Question


@dataclass(frozen=True)
class Table:
    """A table with its column of names, its numeric columns, and its text columns with sample values."""

    name: str
    label: str
    numbers: dict[str, tuple[int, ...]]
    texts: dict[str, tuple[str, ...]]


TABLES = (
    Table("employees", "name", {"salary": (3000, 4500, 52000), "age": (30, 45, 60)},
          {"city": ("Berlin", "Paris", "Oslo"), "department": ("Sales", "Research", "Support")}),
    Table("customers", "name", {"age": (18, 25, 65), "balance": (0, 500, 1000)},
          {"country": ("France", "Japan", "Brazil"), "city": ("Rome", "London", "Madrid")}),
    Table("products", "name", {"price": (10, 50, 99), "stock": (5, 20, 100)},
          {"category": ("toys", "books", "garden"), "color": ("red", "blue", "green")}),
    Table("orders", "id", {"total": (20, 100, 250), "quantity": (1, 3, 12)},
          {"status": ("open", "shipped", "cancelled"), "country": ("Spain", "Canada", "India")}),
    Table("books", "title", {"year": (1950, 1999, 2010), "pages": (100, 300, 800)},
          {"author": ("Jane Austen", "Mark Twain", "Jules Verne"), "language": ("English", "German", "French")}),
    Table("movies", "title", {"rating": (5, 7, 8), "year": (1980, 2000, 2020)},
          {"genre": ("comedy", "horror", "drama"), "director": ("Spielberg", "Hitchcock", "Kubrick")}),
    Table("students", "name", {"grade": (1, 2, 4), "age": (16, 19, 22)},
          {"major": ("biology", "history", "physics"), "city": ("Boston", "Vienna", "Athens")}),
    Table("flights", "number", {"price": (100, 300, 900), "duration": (60, 90, 240)},
          {"destination": ("Tokyo", "Lisbon", "Cairo"), "airline": ("Lufthansa", "Delta", "Iberia")}),
    Table("cars", "model", {"price": (5000, 20000, 40000), "year": (1995, 2005, 2015)},
          {"brand": ("Ford", "Toyota", "Fiat"), "color": ("black", "white", "silver")}),
    Table("players", "name", {"score": (10, 50, 200), "age": (20, 28, 35)},
          {"team": ("Lions", "Eagles", "Sharks"), "position": ("goalkeeper", "striker", "defender")}),
)  # fmt: skip
HELD_OUT_TABLES = (
    Table("hotels", "name", {"price": (80, 150), "stars": (3, 4)}, {"city": ("Prague", "Dublin")}),
    Table("singers", "name", {"age": (27, 40), "albums": (2, 9)}, {"genre": ("jazz", "rock")}),
)
FORMS = (
    ("Show me all {t}.", "SELECT * FROM {t};"),
    ("List the {l} of every one of the {t}.", "SELECT {l} FROM {t};"),
    ("How many {t} are there?", "SELECT COUNT(*) FROM {t};"),
    ("How many {t} have the {c} {v}?", "SELECT COUNT(*) FROM {t} WHERE {c} = '{v}';"),
    ("Show me all {t} with the {c} {v}.", "SELECT * FROM {t} WHERE {c} = '{v}';"),
    ("Find the {l} of all {t} whose {c} is {v}.", "SELECT {l} FROM {t} WHERE {c} = '{v}';"),
    ("Which {t} have a {n} above {k}?", "SELECT * FROM {t} WHERE {n} > {k};"),
    ("Which {t} have a {n} below {k}?", "SELECT * FROM {t} WHERE {n} < {k};"),
    ("Find {t} with a {n} over {k} and the {c} {v}.", "SELECT * FROM {t} WHERE {n} > {k} AND {c} = '{v}';"),
    ("What is the average {n} of the {t}?", "SELECT AVG({n}) FROM {t};"),
    ("What is the highest {n} of all {t}?", "SELECT MAX({n}) FROM {t};"),
    ("What is the total {n} of the {t} per {c}?", "SELECT {c}, SUM({n}) FROM {t} GROUP BY {c};"),
    ("How many {t} are there per {c}?", "SELECT {c}, COUNT(*) FROM {t} GROUP BY {c};"),
    ("Give me the {i} {t} with the highest {n}.", "SELECT * FROM {t} ORDER BY {n} DESC LIMIT {i};"),
    ("Give me the {i} {t} with the lowest {n}.", "SELECT * FROM {t} ORDER BY {n} ASC LIMIT {i};"),
    ("List the {t} sorted by {n}.", "SELECT * FROM {t} ORDER BY {n};"),
    ("Which different {c} values do the {t} have?", "SELECT DISTINCT {c} FROM {t};"),
    ("Delete all {t} with a {n} below {k}.", "DELETE FROM {t} WHERE {n} < {k};"),
    ("Set the {n} of all {t} with the {c} {v} to {k}.", "UPDATE {t} SET {n} = {k} WHERE {c} = '{v}';"),
)
EVERYDAY = {
    "definition": "SELECT description FROM topics WHERE name = '{x}';",
    "howto": "SELECT steps FROM guides WHERE task = '{x}';",
    "capital": "SELECT capital FROM countries WHERE name = '{x}';",
    "chat": "SELECT reply FROM small_talk WHERE message = '{x}';",
}


def requests(tables: tuple[Table, ...], per_form: int, rng: random.Random) -> list[tuple[str, str]]:
    """Request and query, `per_form` random fillings of every form for every table, without repetitions."""
    pairs: dict[str, str] = {}
    for table in tables:
        for ask, query in FORMS:
            for _ in range(per_form):
                column = rng.choice(sorted(table.texts))
                number = rng.choice(sorted(table.numbers))
                fill = {
                    "t": table.name,
                    "l": table.label,
                    "c": column,
                    "v": rng.choice(table.texts[column]),
                    "n": number,
                    "k": rng.choice(table.numbers[number]),
                    "i": rng.choice((3, 5, 10)),
                }
                pairs[ask.format(**fill)] = query.format(**fill)
    return list(pairs.items())


def everyday_query(question: Question) -> str:
    """A query for a question that is about no table of ours."""
    return EVERYDAY[question.kind].format(x=question.subject.replace("'", "''"))
