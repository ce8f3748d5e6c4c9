"""What measures servers over HTTP: `pipeinfer bench`, and the tools of a checkout."""
