// Runs the WebAssembly module next to the page. The first message has the bytes of the module, and each further one a request as
// text, which is answered by a message with the answer as text.

let bytes, module;

function ask(request) {
  const { memory, buffer, answer, buffer_address } = module.exports;
  const text = new TextEncoder().encode(request), at = buffer(text.length);
  new Uint8Array(memory.buffer, at, text.length).set(text);
  const length = answer();
  // The memory may have grown, and then has another buffer.
  return new TextDecoder().decode(new Uint8Array(memory.buffer, buffer_address(), length));
}

onmessage = async ({ data }) => {
  if (data instanceof Uint8Array) {
    bytes = data;
    return;
  }
  try {
    module ??= (await WebAssembly.instantiate(bytes)).instance;
    postMessage(ask(data));
  } catch (error) {
    // An instance that failed has an unknown state.
    module = undefined;
    postMessage(JSON.stringify({ error: `The computation failed (${error.message}); use a smaller size.` }));
  }
};
