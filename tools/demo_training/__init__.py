"""How the bundled demo model is made: checkpoint files, corpus, training, measuring.

Nothing here is needed to serve the model, and nothing here knows how it is served.
"""
