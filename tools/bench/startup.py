def add_arguments(p): pass
def run(o,s): return {}
