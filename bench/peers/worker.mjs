// llama.cpp serving a benchmark's requests by node-llama-cpp (the library's prebuilt binaries; it has no server): see worker.py.
//
//     node worker.mjs llamacpp-KIND --root FOLDER --gguf FILE --draft-gguf FILE --threads N --ends ID ...
import {createRequire} from "node:module";
import readline from "node:readline";
import {pathToFileURL} from "node:url";
import {parseArgs} from "node:util";

const DRAFT_TOKENS = 4;
const LOOKUP_NGRAM = {min: 2, max: 3};
const PLACES = 8;
const CONTEXT_TOKENS = 2048;

const {values: options, positionals} = parseArgs({
    allowPositionals: true,
    options: {
        root: {type: "string"},
        gguf: {type: "string"},
        "draft-gguf": {type: "string"},
        threads: {type: "string", default: "1"},
        ends: {type: "string", multiple: true, default: []}
    }
});
const kind = positionals[0].split("-")[1];
const ends = new Set(options.ends.map(Number));
const threads = Number(options.threads);
const library = await import(pathToFileURL(createRequire(`${options.root}/`).resolve("node-llama-cpp")));
const llama = await library.getLlama({
    gpu: false,
    build: "never",
    skipDownload: true,
    maxThreads: threads,
    progressLogs: false,
    logger: (level, message) => process.stderr.write(`${level}: ${message}\n`)
});

async function open(modelPath) {
    const model = await llama.loadModel({modelPath});
    return model.createContext({sequences: PLACES, contextSize: CONTEXT_TOKENS, threads});
}

const context = await open(options.gguf);
const draft = kind === "draft" ? await open(options["draft-gguf"]) : null;

function predictor(prompt) {
    if (kind === "draft") {
        const always = {minTokens: DRAFT_TOKENS, maxTokens: DRAFT_TOKENS, minConfidence: 0};
        return new library.DraftSequenceTokenPredictor(draft.getSequence(), always);
    }
    if (kind !== "lookup") return undefined;
    const made = new library.InputLookupTokenPredictor({patternLength: LOOKUP_NGRAM, predictionLength: {max: DRAFT_TOKENS}});
    made.updateInputTokens(prompt);
    return made;
}

async function serveOne(prompt, maxTokens) {
    const begun = performance.now();
    const tokenPredictor = predictor(prompt);
    const sequence = context.getSequence({tokenPredictor});
    const tokens = [];
    let first, last;
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        last = performance.now();
        first ??= last;
        tokens.push(token);
        if (tokens.length === maxTokens || ends.has(token)) break;
    }
    await sequence.dispose();
    await tokenPredictor?.draftSequence?.dispose();
    return {tokens, first_s: (first - begun) / 1000, total_s: (last - begun) / 1000};
}

async function serve({prompts, max_tokens: maxTokens, concurrency}) {
    const replies = [], begun = performance.now();
    let next = 0;
    async function place() {
        while (next < prompts.length) {
            const number = next++;
            replies[number] = await serveOne(prompts[number], maxTokens);
        }
    }
    await Promise.all(Array.from({length: concurrency}, place));
    return {replies, wall_s: (performance.now() - begun) / 1000};
}

process.stdout.write("ready\n");
for await (const line of readline.createInterface({input: process.stdin})) process.stdout.write(`${JSON.stringify(await serve(JSON.parse(line)))}\n`);
process.exit(0);
