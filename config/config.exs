import Config

# Where ops run: :auto (where the tensors are; large work from the host on a GPU if there is one),
# :cpu, {:cuda, ordinal} or :nx. The environment variable SIDEWINDER_BACKEND goes before it.
config :sidewinder, backend: :auto

# CPU threads, or nil for one per core. SIDEWINDER_THREADS goes before it.
config :sidewinder, threads: nil
