"""The embedded engine over HTTP, spoken as OpenAI's API: `tinyllm serve MODEL`.

fields.py reads a JSON body with every mistake named, protocol.py makes requests of it, worker.py is the thread that the
engine runs in, answers.py and text.py what goes back, weights.py new weights in place, metrics.py what is counted,
access.py who may ask, app.py the routes, server.py start and end, command.py the command line.
"""
