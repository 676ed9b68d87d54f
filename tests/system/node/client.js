// A client made from the protos alone: node client.js <folder of the protos> <host:port>. Prints what it saw as JSON.
'use strict';

const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [protos, target] = process.argv.slice(2);
const definition = loader.loadSync(path.join('pagewire', 'v1', 'frontend.proto'), {
  includeDirs: [protos],
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { FrontendService } = grpc.loadPackageDefinition(definition).pagewire.v1;
const client = new FrontendService(target, grpc.credentials.createInsecure());

const unary = (method, request) =>
  new Promise((resolve, reject) => {
    client[method](request, (error, response) => (error ? reject(error) : resolve(response)));
  });

// Messages of a Generate stream; cancels after `limit` of them. Resolves with messages and the error that ended it.
const generate = (request, limit = Infinity) =>
  new Promise((resolve) => {
    const messages = [];
    const call = client.Generate(request);
    call.on('data', (message) => {
      messages.push(message);
      if (messages.length === limit) call.cancel();
    });
    call.on('error', (error) => resolve({ messages, error }));
    call.on('end', () => resolve({ messages, error: null }));
  });

async function main() {
  const { model } = await unary('GetModel', {});
  const { tokenIds } = await unary('Tokenize', { text: 'Grüße, 世界 🌍' });
  const { text: detokenized } = await unary('Detokenize', { tokenIds });

  const samplingParams = { maxTokens: 5, temperature: 0 };
  const whole = await generate({ text: 'The capital of France is', samplingParams });
  if (whole.error) throw whole.error;
  const outputs = whole.messages.flatMap((message) => message.outputs);

  const long = { text: 'Once upon a time', samplingParams: { maxTokens: 1000, ignoreEos: true } };
  const cancelled = await generate(long, 2);
  const bad = await generate({ text: 'x', samplingParams: { topP: 1.5 } });

  console.log(
    JSON.stringify({
      model: model.name,
      detokenized,
      text: outputs.map((output) => output.text).join(''),
      finishReason: outputs[outputs.length - 1].finishReason,
      cancelled: cancelled.error.code,
      errorCode: bad.error.code,
      errorMessage: bad.error.details,
    }),
  );
  client.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
