defmodule Sidewinder.Native do
  @moduledoc false

  @on_load :load
  @why {__MODULE__, :why_not_loaded}

  # If this module failed to load, so would the whole application, but pure Nx works without the library.
  # Failing is right only if an older version of the module runs with its library: that one then stays in use.
  def load do
    why = load_nif(path())
    runs? = :erlang.module_loaded(__MODULE__) and loaded?()
    if why != nil and runs?, do: {:error, why}, else: :persistent_term.put(@why, why)
  end

  defp path do
    Application.app_dir(:sidewinder, "priv/native/sidewinder_nif")
  rescue
    ArgumentError -> nil
  end

  defp load_nif(nil), do: "the application :sidewinder is not on the code path"

  defp load_nif(path) do
    case :erlang.load_nif(path, 0) do
      :ok -> nil
      {:error, {_reason, text}} -> List.to_string(text)
    end
  end

  @doc "Whether the native library is there."
  def loaded?, do: why_not_loaded() == nil

  @doc "Why the native library is not there, or nil."
  def why_not_loaded, do: :persistent_term.get(@why, "it was never loaded")

  def run_quick(_op, _inputs, _options, _target), do: missing()
  def run_cpu(_op, _inputs, _options, _target), do: missing()
  def run_io(_op, _inputs, _options, _target), do: missing()
  def run_watched_cpu(_op, _inputs, _options, _target, _watch), do: missing()
  def run_watched_io(_op, _inputs, _options, _target, _watch), do: missing()
  def run_parts_cpu(_op, _parts, _options, _target), do: missing()
  def run_parts_io(_op, _parts, _options, _target), do: missing()

  def cpu_info, do: missing()
  def cuda_info, do: missing()

  def buffer_from_host(_tensor, _ordinal), do: missing()
  def buffer_to_host(_tensor), do: missing()
  def buffer_device(_tensor), do: missing()
  def buffer_reshape(_tensor, _sizes), do: missing()

  def held_new(_type, _sizes, _ordinal), do: missing()
  def held_grow(_tensor, _first, _rows, _room), do: missing()
  def held_rows(_tensor, _first, _rows), do: missing()

  def tensor_cast(_tensor, _type), do: missing()
  def tensor_difference(_tensor, _reference), do: missing()

  def safetensors_index(_path), do: missing()
  def safetensors_read(_path, _names, _watch), do: missing()
  def safetensors_metadata(_path), do: missing()
  def safetensors_write(_path, _tensors, _told, _watch), do: missing()
  def safetensors_encode(_tensors), do: missing()
  def safetensors_decode(_bytes), do: missing()
  def safetensors_create(_path, _specs, _told), do: missing()
  def safetensors_put(_writer, _name, _tensor), do: missing()
  def safetensors_finish(_writer), do: missing()
  def safetensors_abandon(_writer), do: missing()

  def gguf_index(_path), do: missing()
  def gguf_metadata(_path), do: missing()
  def gguf_read(_path, _name, _watch), do: missing()

  def mamba_load(_path, _loading, _target, _watch), do: missing()
  def mamba_ends(_path, _vocabulary), do: missing()
  def mamba_ends_in(_config, _vocabulary), do: missing()
  def mamba_new(_config, _tensors, _loading, _target, _watch), do: missing()
  def mamba_tensors(_model), do: missing()
  def mamba_save(_model, _path, _watch), do: missing()
  def mamba_described(_model, _configs), do: missing()
  def mamba_quantized_config(_config, _names), do: missing()
  def mamba_files(_path), do: missing()
  def mamba_told(_names), do: missing()
  def json_merged(_texts), do: missing()
  def mamba_names(_model_type), do: missing()
  def mamba_forward_cpu(_model, _input, _watch), do: missing()
  def mamba_forward_io(_model, _input, _watch), do: missing()
  def mamba_session(_model), do: missing()
  def mamba_prefill_cpu(_session, _input, _wanted, _watch), do: missing()
  def mamba_prefill_io(_session, _input, _wanted, _watch), do: missing()
  def mamba_loss_cpu(_session, _input, _watch), do: missing()
  def mamba_loss_io(_session, _input, _watch), do: missing()
  def mamba_trainer(_model, _targets), do: missing()
  def mamba_learn_cpu(_trainer, _input, _how, _watch), do: missing()
  def mamba_learn_io(_trainer, _input, _how, _watch), do: missing()
  def mamba_learnt(_trainer, _loading, _target, _watch), do: missing()
  def mamba_step_cpu(_sessions, _input), do: missing()
  def mamba_step_io(_sessions, _input), do: missing()
  def mamba_next_cpu(_sessions, _input, _samplings), do: missing()
  def mamba_next_io(_sessions, _input, _samplings), do: missing()
  def mamba_fork(_session), do: missing()
  def mamba_reset(_session), do: missing()
  def mamba_length(_session), do: missing()
  def mamba_dump(_session), do: missing()
  def mamba_restore(_model, _dump), do: missing()
  def mamba_alike(_model), do: missing()
  def mamba_choose(_session, _logits, _sampling), do: missing()
  def mamba_sampling(_sampling), do: missing()

  def cancellation_new(_owner), do: missing()
  def cancellation_cancel(_cancellation), do: missing()
  def cancellation_cancelled(_cancellation), do: missing()

  def tokenizer_open(_path), do: missing()
  def tokenizer_encode(_tokenizer, _text), do: missing()
  def tokenizer_decode(_tokenizer, _tokens), do: missing()
  def tokenizer_token(_tokenizer, _text), do: missing()
  def tokenizer_special(_tokenizer, _text), do: missing()
  def tokenizer_end(_tokenizer), do: missing()
  def tokenizer_beginning(_tokenizer, _wanted), do: missing()
  def tokenizer_start(_tokenizer, _tokens), do: missing()
  def tokenizer_next(_tokenizer, _window, _token), do: missing()
  def tokenizer_rest(_tokenizer, _window), do: missing()

  def xla_register(_path), do: missing()
  def xla_target(_op, _inputs, _outputs, _options, _cuda), do: missing()

  def debug_device_bytes(_ordinal), do: missing()
  def debug_panic(_text), do: missing()
  def debug_panic_in_encode, do: missing()
  def debug_lose_device(_ordinal), do: missing()

  defp missing do
    :erlang.nif_error(
      Sidewinder.Error.new(:unavailable, "native library",
        expected: "Sidewinder's compiled library",
        got: got(why_not_loaded()),
        hint:
          "Build it with `mix compile --force` where cargo is installed, and start Erlang again"
      )
    )
  end

  # The library stays in memory as it was when the module is loaded again.
  defp got(nil), do: "one that was built before this function was added"
  defp got(why), do: "none (#{why})"
end
