# shop.py
"""A shop that takes orders."""

import fulfilment  # new
import orders
from flask import Flask, abort, request

from rebuno_sync import Client  # new

app = Flask(__name__)
app.register_blueprint(fulfilment.agent.blueprint, url_prefix="/agents/shop")  # new


@app.get("/health")
def health() -> str:
    return "ok"


@app.post("/orders")
def order() -> tuple[dict[str, int], int]:
    number = orders.add(request.get_json())
    with Client() as client:  # new
        client.create("shop", {"order": number}, idempotency_key=f"order-{number}")  # new
    return {"order": number}, 202


@app.get("/orders/<int:number>")
def show(number: int) -> dict[str, str]:
    return {"state": orders.state(number) or abort(404)}
