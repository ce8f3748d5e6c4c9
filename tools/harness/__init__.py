"""What several tools share: their command line, a server under test, raw HTTP, helper processes."""
