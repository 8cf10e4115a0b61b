"""The two halves of an app of Flower: they are installed with fedminimax, not sent along."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedminimax.remote.flower.runs import answered, serve_app
from fedminimax.remote.flower.transport import FlowerTransport, packed, unpacked

server = ServerApp()
client = ClientApp()


@server.main()
def serve_run(grid: Grid, context: Context) -> None:
    """The server's part of the app: serves the run that its settings name."""
    serve_app(context.run_config, FlowerTransport(grid))


@client.query()
def answer(message: Message, context: Context) -> Message:
    """A site's part of the app: answers one message."""
    return Message(packed(answered(context.node_config, unpacked(message))), reply_to=message)
