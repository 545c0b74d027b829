defmodule Sidewinder.NxTest.Served do
  @moduledoc "Servings on another node, which must have code of its own to run."

  alias Sidewinder.Mamba

  @doc "Starts a node with this one's code, linked to the caller. Starts distribution if need be."
  def start_node! do
    Node.alive?() || start_distribution!()
    [_, host] = node() |> Atom.to_charlist() |> :string.split(~c"@")
    paths = Enum.flat_map(:code.get_path(), &[~c"-pa", &1])
    args = [~c"-setcookie", Atom.to_charlist(Node.get_cookie()) | paths]
    options = %{name: :peer.random_name(~c"sidewinder"), host: host, args: args}
    {:ok, peer, node} = :peer.start_link(options)
    {:ok, _} = :erpc.call(node, Application, :ensure_all_started, [:sidewinder])
    {peer, node}
  end

  defp start_distribution! do
    start_port_mapper()

    case Node.start(:"sidewinder_#{System.pid()}@127.0.0.1", :longnames) do
      {:ok, _} ->
        :ok

      {:error, reason} ->
        raise """
        Erlang's distribution does not start, and servings are tested over two nodes. Start its port mapper with \
        `epmd -daemon`, and let this machine connect to itself, 127.0.0.1, on port 4369 and those above 1024. \
        The reason: #{inspect(reason)}
        """
    end
  end

  # Erlang starts it by itself only for nodes that have a name from the beginning.
  defp start_port_mapper do
    if epmd = System.find_executable("epmd"), do: System.cmd(epmd, ["-daemon"])
    until_listening(System.monotonic_time(:millisecond) + 10_000)
  end

  # The daemon detaches before it listens.
  defp until_listening(deadline) do
    with {:error, _} <- :erl_epmd.names(~c"127.0.0.1"),
         true <- System.monotonic_time(:millisecond) < deadline do
      Process.sleep(20)
      until_listening(deadline)
    end
  end

  @doc "Runs servings of the model in `folder` on `node`, `{name, options}` each, for as long as the caller lives."
  def serve!(node, folder, servings) do
    Node.spawn_link(node, __MODULE__, :run, [self(), folder, servings])

    receive do
      :serving -> for {name, _} <- servings, do: await(name)
    end
  end

  @doc false
  def run(parent, folder, servings) do
    model = Mamba.load(folder, backend: :cpu)

    children =
      for {name, options} <- servings,
          do: {Nx.Serving, serving: Mamba.serving(model, options), name: name, batch_size: 4}

    {:ok, _} = Supervisor.start_link(children, strategy: :one_for_one)
    ref = Process.monitor(parent)
    send(parent, :serving)

    receive do
      {:DOWN, ^ref, _, _, _} -> :ok
    end
  end

  # Until this node has heard of it.
  defp await(name) do
    if :pg.get_members(Nx.Serving.PG, name) == [] do
      Process.sleep(5)
      await(name)
    end
  end
end
