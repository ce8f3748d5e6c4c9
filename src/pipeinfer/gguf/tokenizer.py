def tokenizer_json(metadata):
    return {}


def tokenizer_config(metadata):
    return {}
