"""`forebay bench ttft`: time to first token when stored prefixes are fetched by ticket, beside the usual stage-by-stage route.

`plan` says what is asked of whom, `server` runs the servers, `load` is the client, `judge` says whether a sample counts, `summary`
makes the result document, `report` draws it, and `run` is the measurement from beginning to end.
"""
