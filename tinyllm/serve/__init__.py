"""The embedded engine over HTTP, in the form of OpenAI's API: `tinyllm serve MODEL`.

fields.py reads JSON bodies, protocol.py makes checked requests of them, app.py has the routes, admin.py those that
change weights, asgi.py the middleware and the streaming response, worker.py the engine's thread, responses.py and
text.py write what clients get, weights.py loads new weights in place, server.py runs it all on a socket.
"""
