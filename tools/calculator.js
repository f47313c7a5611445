"use strict";
// Memory and communication of a training step, by the formulas of analysis/memory.py and analysis/theory.py. Names are
// those of the Python functions. What Python knows (layouts, weights, constants, devices) is in the data that
// tools/calculator.py writes. Left out is what its models do not have: adapters, biases, patches, tied embeddings.
const calculator = ((data) => {
  class Refused extends Error {} // errors.py, ConfigError

  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
  const same = (a, b) => a.length === b.length && a.every((axis, i) => axis === b[i]);
  const part = (n) => (n - 1) / n; // analysis/case.py
  const either = (options) =>
    options.length === 1 ? options[0] : `${options.slice(0, -1).join(", ")} or ${options.at(-1)}`;

  function round(number) {
    // To the nearest integer, and to the even one of two, as Python does.
    const low = Math.floor(number), rest = number - low;
    return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
  }

  function general(number, digits) {
    // Python's format "g".
    const [mantissa, exponent] = number.toExponential(digits - 1).split("e");
    if (+exponent >= -4 && +exponent < digits) return String(+number.toPrecision(digits));
    return `${+mantissa}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
  }

  function positive(field, value) {
    if (!Number.isInteger(value)) throw new Refused(`${field} must be a whole number`);
    if (Math.abs(value) >= 2 ** 31)
      throw new Refused(`${field}=${value} does not fit into 32 bits; use a number below 2147483648`);
    if (value < 1) throw new Refused(`${field}=${value} must be at least 1`);
    return value;
  }

  // analysis/search.py
  function modelOf(params, length) {
    const refuse = () => {
      throw new Refused(`params=${general(params, 6)} does not fit a model with Llama's proportions; use 1e8 to 1e12`);
    };
    if (!(params >= 1e7 && params <= 1e13)) refuse();
    const sizes = [];
    const all = [...Array(3).keys()].map((i) => 4 + 4 * i).concat([...Array(31).keys()].map((i) => 16 + 8 * i));
    for (const heads of all) {
      const width = 128 * heads, mlp = round(((8 / 3) * width) / 256) * 256;
      const perBlock = 4 * width * width + 3 * width * mlp;
      let depth = Math.max(1, round((params - 2 * width * 32000) / perBlock));
      depth = Math.max(4, round(depth / 4) * 4);
      const count = 2 * width * 32000 + depth * perBlock;
      sizes.push([Math.abs(count / params - 1) + Math.abs(Math.log(depth / heads)), heads, depth, mlp, count]);
    }
    const [, heads, depth, mlp, count] = sizes.reduce((best, one) => (one[0] < best[0] ? one : best));
    if (Math.abs(count / params - 1) > 0.2) refuse();
    const named = { width: 128 * heads, depth, heads, kv_heads: heads, head_dim: 128, mlp_width: mlp };
    return { ...named, seq_len: length, vocab_size: 32000 };
  }

  // strategies/layout.py
  const FOLLOWS = { gradients: "embed", state: "gradients" };

  class Layout {
    constructor(mesh, places) {
      Object.assign(this, { mesh, places });
    }
    get deviceCount() {
      return product(Object.values(this.mesh));
    }
    axes(dim) {
      const place = this.places[dim];
      return place.length || !(dim in FOLLOWS) ? place : this.axes(FOLLOWS[dim]);
    }
    shards(dim) {
      return product(this.axes(dim).map((axis) => this.mesh[axis]));
    }
    forPositions(count) {
      return count % this.shards("sequence") ? new Layout(this.mesh, { ...this.places, sequence: [] }) : this;
    }
    axesByHand(gathersOnce) {
      const batch = this.axes("batch"), embed = this.axes("embed");
      const axes = Object.keys(this.mesh).filter((axis) => this.mesh[axis] > 1 && batch.includes(axis));
      const asWeights = same(this.axes("gradients"), embed);
      return gathersOnce || (asWeights && axes.some((axis) => !embed.includes(axis))) ? axes : [];
    }
    checkDivides(sizes) {
      for (const [dim, field, size] of sizes) {
        const finest = dim === "embed" ? "state" : dim, shards = this.shards(finest);
        if (size % shards === 0) continue;
        const fields = this.axes(finest).map((axis) => `mesh.${axis}=${this.mesh[axis]}`).join(" × ");
        const divisors = [...Array(Math.min(size, 64)).keys()].map((d) => d + 1).filter((d) => size % d === 0);
        const padded = Math.ceil(size / shards) * shards;
        throw new Refused(
          `${fields} does not divide ${field}=${size}; use ${either(divisors.map(String))}, or ${field}=${padded}`,
        );
      }
    }
  }

  // strategies/pipeline/schedule.py: in closed form what `build` finds tick by tick, for the schedules without chunks.
  // `exchanges` are the ticks of `_stages` in theory.py, for activations and for cotangents.
  const ORDERS = {
    gpipe: (stages, microbatches) => ({ residuals: microbatches, exchanges: 2 * (microbatches + stages - 1) }),
    "1f1b": (stages, microbatches) => ({
      residuals: Math.min(2 * stages - 1, microbatches),
      exchanges: microbatches === 1 ? 2 * (stages - 1) : 2 * (microbatches + stages - 1),
    }),
  };

  function build(order, stages, microbatches) {
    return { microbatches, ...ORDERS[order](stages, microbatches) };
  }

  // analysis/case.py
  class Case {
    constructor(fields) {
      Object.assign(this, fields); // layout, model, batchSize, accumulation, schedule, compiler, gathersOnce, sumsByHand
    }
    get units() {
      return this.accumulation * (this.schedule ? this.schedule.microbatches : 1);
    }
    get once() {
      return this.gathersOnce || this.schedule !== null;
    }
    get byHand() {
      return this.sumsByHand || this.units > 1 ? this.layout.axesByHand(this.once) : [];
    }
    get savesAttention() {
      return data.remat[this.model.remat].saves_attention; // "attention_output" in saved_names
    }
    get repeats() {
      return this.model.remat === "full" || this.model.remat === "offload";
    }
    get policy() {
      return this.repeats ? "full" : this.model.remat;
    }
    get examples() {
      return this.batchSize / this.units / this.layout.shards("batch");
    }
    get parts() {
      const { layout } = this;
      return { heads: layout.shards("heads"), mlp: layout.shards("mlp"), sequence: layout.shards("sequence") };
    }
    get outputs() {
      return this.model.vocab_size / this.layout.shards("vocab");
    }
    get logits() {
      return this.model.seq_len * this.outputs;
    }
    axes(dim) {
      return this.ordered(this.layout.axes(dim));
    }
    ordered(axes) {
      return Object.keys(this.layout.mesh).filter((axis) => axes.includes(axis));
    }
    devices(axes) {
      return product(axes.map((axis) => this.layout.mesh[axis]));
    }
    held(weight) {
      return sizeOf(weight, this.model) / product(weight.dims.map((dim) => (dim ? this.layout.shards(dim) : 1)));
    }
    used(weight) {
      return this.held(weight) * (weight.is_matrix ? this.layout.shards("embed") : 1);
    }
    kept(weight) {
      const gathered = this.axes("embed").filter((axis) => this.once && this.byHand.includes(axis));
      return this.held(weight) * (weight.is_matrix ? this.devices(gathered) : 1);
    }
    summed(weight) {
      return this.byHand.length ? this.kept(weight) : this.pieces(weight, this.scattered);
    }
    updated(weight) {
      return this.pieces(weight, this.axes("state"));
    }
    get scattered() {
      return this.axes(this.units === 1 ? "state" : "gradients");
    }
    pieces(weight, axes) {
      return this.used(weight) / (weight.is_matrix ? this.devices(axes) : 1);
    }
  }

  const sizeOf = (weight, model) => product(weight.shape.map((name) => model[name]));

  // analysis/compilers.py
  const COMPILERS = {
    tpu: {
      scatters(c, weight) {
        const dims = weight.dims.filter((dim) => dim !== "layers");
        const others = dims.filter((dim) => dim !== "embed");
        const isSmall = others.length < dims.length && others.length && others.every((dim) => dim === null);
        return !isSmall && c.scattered.every((axis) => c.axes("batch").includes(axis));
      },
      scattersStream: (c) => ((c.model.seq_len / c.layout.shards("sequence")) * data.item) % data.rows === 0,
      scattersByHand: (c, axes) => c.devices(axes) < c.layout.deviceCount,
      scattersTables: false,
      edgeGathers: (c) => (c.byHand.length ? c.units : 1),
      attentionAgain: () => 0,
    },
    gpu: {
      scatters: () => true,
      scattersStream: () => true,
      scattersByHand: () => true,
      scattersTables: true,
      edgeGathers: (c) => c.units,
      attentionAgain(c) {
        if (c.savesAttention || c.layout.shards("sequence") === 1) return 0;
        const rounds = c.model.depth / c.layout.shards("layers") / (c.schedule ? data.unroll : 1);
        return Math.max(rounds - 1, 0) / rounds;
      },
    },
  };

  // analysis/saved.py: Python has read from JAX's traces how many bytes a block has for each position and size. A term
  // is [bytes, the size that they are proportional to, what splits them].
  function perExample(c, terms) {
    const { model, parts } = c;
    return sum(terms.map(([bytes, size, split]) => (bytes * model.seq_len * (model[size] ?? 1)) / (parts[split] ?? 1)));
  }

  const saved = (c, layers, kind = "device") => layers * perExample(c, data.saved[c.compiler][c.model.remat][kind]);

  // analysis/memory.py
  function memoryOf(c) {
    const fitted = data.fitted[c.compiler], weights = data.weights;
    const total = (count) => sum(weights.map((weight) => c[count](weight)));
    const [held, kept, summed, updated] = ["held", "kept", "summed", "updated"].map(total);
    const cast = c.byHand.length ? kept * data.item : fitted.cast * held * data.item;
    let gradients = summed * data.param, loss = lossBytes(c);
    const savedHere = c.examples * savedBytes(c);
    if (c.units > 1) gradients += fitted.part * summed * (c.byHand.length && !c.schedule ? data.item : data.param);
    else loss -= gradients;
    let working = Math.max(blockBytes(c), loss) + cast;
    if (updated < held) working = Math.max(working, held * data.param - gradients - savedHere);
    const host = c.examples * offloaded(c, layersOf(c));
    return { parameters: held * data.param, optimizer: stateBytes(c), gradients, saved: savedHere, working, host };
  }

  const layersOf = (c) => Math.floor(c.model.depth / c.layout.shards("layers"));

  function stateBytes(c) {
    // analysis/update.py
    const inState = (dim) => (dim ? c.devices(c.axes(dim === "embed" ? "state" : dim)) : 1);
    return sum(data.weights.map((w) => (w.moments * sizeOf(w, c.model)) / product(w.dims.map(inState))));
  }

  const offloaded = (c, layers) => saved(c, layers, "host"); // host.py

  function savedBytes(c) {
    // _saved
    if (!c.schedule) return saved(c, layersOf(c)) + data.in_flight * offloaded(c, 1);
    const copies = layersOf(c) > data.unroll ? 2 : 1;
    return (c.schedule.residuals + copies) * saved(c, layersOf(c));
  }

  function blockBytes(c) {
    // _block
    const fitted = data.fitted[c.compiler], splitsPositions = c.layout.shards("sequence") > 1, layers = layersOf(c);
    let copies = fitted.block[c.policy];
    if (c.schedule) copies += layers > data.unroll ? 1.0 : 0.6;
    if (c.layout.shards("heads") > 1 && !splitsPositions && c.repeats) copies += fitted.sums;
    let total = c.examples * copies * perExample(c, data.values[c.compiler]);
    if (splitsPositions) total += fitted.whole * c.examples * c.model.seq_len * c.model.width * data.item;
    const gathered = sum(data.weights.filter((w) => w.in_blocks && c.used(w) > c.kept(w)).map((w) => c.used(w) * w.item));
    return total + (fitted.gathered * gathered) / layers + fitted.head_later * gatheredHead(c);
  }

  function lossBytes(c) {
    // _loss
    const head = data.fitted[c.compiler].head * gatheredHead(c), logits = c.examples * c.logits, width = c.model.width;
    const count = chunkCount(Math.trunc(logits / c.outputs), width, Math.trunc(c.outputs));
    return head + (4 * logits) / count + (count > 1 ? (4 + data.item) * width * c.outputs : 0);
  }

  function chunkCount(tokens, width, vocab) {
    // models/losses.py
    return tokens < width ? 1 : Math.max(1, Math.ceil(tokens / Math.max(data.least, Math.floor(data.logits / vocab))));
  }

  function gatheredHead(c) {
    return sum(data.weights.filter((w) => w.is_head && c.used(w) > c.held(w)).map((w) => c.used(w) * w.item));
  }

  // analysis/theory.py. A row is [kind, axes, bytes, what]; what nothing can hide is not told apart here.
  function sent(c) {
    const purposes = [weights, updates, gradients, tableGradients, activations, stages];
    const rows = purposes.flatMap((find) => find(c)).filter((row) => row[2]);
    return rows.map(([kind, axes, bytes, what]) => ({ kind, axes, bytes, what }));
  }

  const matrices = () => data.weights.filter((weight) => weight.is_matrix);

  function weights(c) {
    const compiler = COMPILERS[c.compiler], byHand = c.byHand;
    const once = c.axes("embed").filter((axis) => c.once && byHand.includes(axis));
    const each = c.axes("embed").filter((axis) => !once.includes(axis));
    const times = (weight) => (weight.in_blocks ? 2 * c.units : compiler.edgeGathers(c));
    const ofParts = part(c.devices(each)) * sum(matrices().map((w) => times(w) * c.used(w) * w.item));
    const forStep = part(c.devices(once)) * sum(matrices().map((w) => c.kept(w) * w.item));
    return [
      ["all-gather", each, ofParts, "weights, for the forward and for the backward pass"],
      ["all-gather", once, forStep, "weights, once a step"],
    ];
  }

  function updates(c) {
    const axes = c.axes("state").filter((axis) => !c.axes("embed").includes(axis));
    const size = part(c.devices(axes)) * data.param * sum(matrices().map((w) => c.held(w)));
    return [["all-gather", axes, size, "new weights, from the pieces that devices update"]];
  }

  function gradients(c) {
    if (c.byHand.length || c.schedule) return [...sums(c), ...overPositions(c)];
    const compiler = COMPILERS[c.compiler], batch = c.axes("batch");
    const sharded = batch.filter((axis) => c.scattered.includes(axis));
    const whole = batch.filter((axis) => !sharded.includes(axis));
    const reduced = matrices().filter((w) => !w.is_table || compiler.scattersTables);
    const scattered = reduced.filter((w) => compiler.scatters(c, w));
    const sliced = reduced.filter((w) => !compiler.scatters(c, w));
    const n = c.devices(sharded), r = c.devices(whole);
    const toShards = `gradients, to ${same(c.scattered, c.axes("embed")) ? "the weight shards" : "pieces"}`;
    const size = (chosen) => c.units * sum(chosen.map((w) => c.used(w) * w.item));
    const row = (kind, axes, chosen, each, what) => [kind, axes, each * size(chosen), what];
    return [
      row("reduce-scatter", sharded, scattered, part(n), toShards),
      row("all-reduce", sharded, sliced, 2 * part(n), toShards),
      row("all-reduce", whole, reduced, (2 * part(r)) / n, "gradients of weights"),
      ...overPositions(c),
    ];
  }

  function overPositions(c) {
    const batch = c.byHand.length ? [] : c.axes("batch"), positions = c.axes("sequence"), sizes = new Map();
    for (const weight of data.weights.filter((w) => !w.is_matrix)) {
      const dim = weight.in_parts_along, axes = c.ordered([...batch, ...(dim ? c.axes(dim) : [])]);
      const item = dim ? 4 : weight.item; // scales are used in float32
      sizes.set(axes.join("+"), [axes, (sizes.get(axes.join("+"))?.[1] ?? 0) + item * c.used(weight)]);
    }
    const what = "gradients of the norms' scales" + (positions.length ? ", and sums over positions" : "");
    return [...sizes.values()].map(([axes, size]) => ["all-reduce", axes, c.units * 2 * size * part(c.devices(axes)), what]);
  }

  function sums(c) {
    const inStages = c.schedule ? c.axes("layers") : [], byHand = c.byHand;
    const stored = c.axes("embed").filter((axis) => byHand.includes(axis));
    const pieces = c.axes("state").filter((axis) => byHand.includes(axis));
    const later = pieces.filter((axis) => !stored.includes(axis));
    const scatters = c.once ? [[pieces, 1]] : [[stored, c.units], [later, 1]];
    const total = new Map();
    const add = (kind, axes, size, what) => {
      const key = [kind, axes.join("+"), what].join();
      total.set(key, [kind, axes, (total.get(key)?.[2] ?? 0) + size, what]);
    };
    for (const weight of data.weights) {
      const split = weight.is_matrix;
      let size = c.held(weight) * weight.item * (split ? c.devices(stored) : 1); // before it is scattered
      for (const [axes, times] of split ? scatters : []) {
        const n = c.devices(axes), stays = COMPILERS[c.compiler].scattersByHand(c, axes);
        const [kind, each] = stays ? ["reduce-scatter", 1] : ["all-reduce", 2];
        add(kind, axes, times * each * size * part(n), "gradients, to the weight shards");
        size /= n;
      }
      const rest = [...(weight.in_blocks ? [] : inStages), ...byHand];
      const whole = c.ordered(rest).filter((axis) => !(split && pieces.includes(axis)));
      add("all-reduce", whole, 2 * size * part(c.devices(whole)), "gradients, once a step");
    }
    return [...total.values()];
  }

  function tableGradients(c) {
    if (c.byHand.length || COMPILERS[c.compiler].scattersTables) return [];
    const batch = c.axes("batch"), tables = sum(data.weights.filter((w) => w.is_table).map((w) => c.used(w)));
    return [["all-reduce", batch, c.units * 2 * part(c.devices(batch)) * data.item * tables, "gradient of the embedding"]];
  }

  function stages(c) {
    if (!c.schedule) return [];
    const stream = (c.examples * c.model.seq_len * c.model.width * data.item) / c.layout.shards("sequence");
    const exchanged = "activations to the next stage, cotangents to the one before";
    return [["collective-permute", c.axes("layers"), c.accumulation * c.schedule.exchanges * stream, exchanged]];
  }

  // analysis/activations.py
  function activations(c) {
    const compiler = COMPILERS[c.compiler], model = c.model;
    const numbers = c.examples * model.seq_len, stream = numbers * model.width * data.item;
    const layers = model.depth / c.layout.shards("layers");
    const again = c.savesAttention ? 0 : 1;
    const heads = 2 + again + compiler.attentionAgain(c), mlp = 2;
    const gathers = layers * (4 + 2 + 2 * Math.max(again - 1, 0)) + 2; // of blocks; of the embedding and the head
    const summed = (dim, size, what) => {
      const split = same(c.axes(dim), c.axes("sequence")) && compiler.scattersStream(c);
      return waits(c, split ? "reduce-scatter" : "all-reduce", dim, size, what);
    };
    return [
      summed("heads", layers * heads * stream, `activations: ${general(heads, 3)} sums a block for the heads`),
      summed("mlp", layers * mlp * stream, `activations: ${mlp} sums a block for the mlp`),
      summed("vocab", 2 * stream, "embedding and head"),
      waits(c, "all-gather", "sequence", gathers * stream, "activations: positions for products"),
      waits(c, "all-reduce", "vocab", numbers * 3 * 4, "loss"),
    ];
  }

  function waits(c, kind, dim, size, what) {
    const times = c.units * (kind === "all-reduce" ? 2 : 1);
    return [kind, c.axes(dim), times * part(c.layout.shards(dim)) * size, what];
  }

  // What strategies/base.py and strategies/pipeline/strategy.py make of a config, with the same checks.
  function caseOf(asked) {
    const { places, mesh: named, by_hand } = data.strategies[asked.strategy];
    if (!Number.isFinite(asked.params)) throw new Refused("params must be a number, such as 7e9");
    const model = { ...modelOf(asked.params, positive("seq_len", asked.seq_len)), remat: asked.remat };
    const tiles = Math.ceil(model.seq_len / data.tile) * data.tile;
    if (model.seq_len !== tiles)
      throw new Refused(
        `seq_len=${model.seq_len} is not a multiple of ${data.tile}, as the kernels of attention need; use ${tiles}`,
      );
    const mesh = Object.fromEntries(named.map((axis) => [axis, positive(`mesh.${axis}`, asked.mesh[axis] ?? 1)]));
    const layout = new Layout(mesh, places).forPositions(model.seq_len), count = layout.shards("layers");
    const accumulation = positive("accumulation", asked.accumulation);
    const batchSize = positive("batch_size", asked.batch_size);
    const pipelined = named.some((axis) => places.layers.includes(axis));
    const microbatches = pipelined ? positive("pipeline.microbatches", asked.microbatches) : 1;
    layout.checkDivides(data.sizes.map(([dim, field]) => [dim, `model.${field}`, model[field]]));
    if (count > 1 && model.remat === "offload")
      throw new Refused(
        "model.remat='offload' does not fit a pipeline, whose stages keep what they save in slots on the device; " +
          "use 'full'",
      );
    const schedule = count > 1 ? build(asked.schedule, count, microbatches) : null;
    checkBatch(batchSize, {
      "devices that split the batch": layout.shards("batch"),
      accumulation,
      "pipeline.microbatches": schedule ? microbatches : 1,
    });
    return new Case({
      layout, model, batchSize, accumulation, schedule, compiler: data.chips[asked.chip].platform,
      gathersOnce: asked.gather === "step" || count > 1, sumsByHand: by_hand || count > 1,
    });
  }

  function checkBatch(size, parts) {
    const unit = product(Object.values(parts));
    if (size % unit === 0) return;
    const named = Object.entries(parts).filter(([name, n]) => n > 1 || name.startsWith("devices"));
    const shown = named.map(([name, n]) => `${n} (${name})`).join(" × ");
    throw new Refused(`batch_size=${size} is not a multiple of ${shown}; use ${Math.max(1, round(size / unit)) * unit}`);
  }

  function result(asked) {
    const c = caseOf(asked), memory = memoryOf(c);
    const total = memory.parameters + memory.optimizer + memory.gradients + memory.saved + memory.working;
    const count = sum(data.weights.map((w) => sizeOf(w, c.model)));
    return { model: c.model, count, devices: c.layout.deviceCount, memory, total, sent: sent(c) };
  }

  // The same, or the sentence that says why not.
  function answer(asked) {
    try {
      return result(asked);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      return { refused: error.message };
    }
  }

  return { data, answer, build, sum };
})(JSON.parse(document.getElementById("calculator-data").textContent));
