# orders.py
"""The shop's orders, in its database."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator


@contextlib.contextmanager
def database() -> Iterator[sqlite3.Connection]:
    """A connection whose changes are kept unless something is raised."""
    connection = sqlite3.connect(os.environ["SHOP_DATABASE"], timeout=30)
    try:
        with connection:
            connection.executescript(
                """
                CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, state TEXT NOT NULL);
                CREATE TABLE IF NOT EXISTS items (
                    order_id INTEGER NOT NULL REFERENCES orders, name TEXT, cents INTEGER
                );
                """
            )
            yield connection
    finally:
        connection.close()


def add(items: dict[str, int]) -> int:
    """Add an order of ``items`` and their prices, and return its number."""
    with database() as db:
        number = db.execute("INSERT INTO orders (state) VALUES ('new')").lastrowid
        rows = [(number, name, cents) for name, cents in items.items()]
        db.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
    return number


def state(number: int) -> str | None:
    """Return the state of an order: ``new`` or ``paid``; ``None`` if there is no such order."""
    with database() as db:
        row = db.execute("SELECT state FROM orders WHERE id = ?", (number,)).fetchone()
    return row and row[0]


def items(number: int) -> list[tuple[str, int]]:
    """Return the items of an order and their prices in cents."""
    with database() as db:
        query = "SELECT name, cents FROM items WHERE order_id = ? ORDER BY rowid"
        return db.execute(query, (number,)).fetchall()


def mark_paid(number: int) -> None:
    """Note that an order is paid."""
    with database() as db:
        db.execute("UPDATE orders SET state = 'paid' WHERE id = ?", (number,))
