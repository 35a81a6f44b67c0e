"""One benchmark a module: `run(context)` adds rows to `context.part`."""
