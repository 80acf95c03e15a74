// The timeline of a simulated step: a row for ranks that do the same, drawn on a canvas, so that a step of a
// thousand ranks moves smoothly. Pointing at a bar follows its samples through the sections.
"use strict";
(() => {
  const data = page.data.timeline, box = document.querySelector("[data-timeline]");
  if (!data || !box) return;
  const tools = document.querySelector("[data-timeline-tools]"), note = document.querySelector("[data-timeline-note]");
  const follow = document.querySelector("[data-follow]"), journey = document.querySelector("[data-journey]");
  const scroll = box.querySelector(".timeline-scroll"), canvas = box.querySelector("canvas");
  const spacer = box.querySelector(".timeline-height"), context = canvas.getContext("2d");
  for (const element of [tools, box, note]) element.hidden = false;

  const WAIT = 0, REDUCE = 1, CLOSING = 2, FIRST = 3, KINDS = ["forward", "backward", "weight gradients"];
  const AXIS = 26, TALLEST = 24;
  const seconds = (ticks) => (ticks * data.ns_per_tick) / 1e9;

  // Bars with their start and end, by row; computations know their micro-batch and kind.
  const rows = data.rows.map((row, r) => {
    const bars = [];
    let last = 0;
    for (let i = 0; i < row.bars.length; i += 3) {
      const start = last + row.bars[i], end = start + row.bars[i + 1], code = row.bars[i + 2];
      const micro = code < FIRST ? -1 : Math.floor((code - FIRST) / 3);
      bars.push({ row: r, start, end, code, micro, kind: code < FIRST ? -1 : (code - FIRST) % 3 });
      last = end;
    }
    return { ...row, bars };
  });
  const computations = rows.flatMap((row) => row.bars.filter((bar) => bar.micro >= 0));
  const microSamples = data.micros.map((m) => new Set(m[3]));
  const patterns = new Map(data.samples);

  let height = Math.max(2, Math.min(20, Math.floor(480 / rows.length)));
  let transform = libraries.zoomIdentity, left = 0, width = 0;
  let pointed = null; // the bar under the pointer
  let colours = {};

  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    colours = {
      sections: Array.from({ length: 8 }, (_, i) => read(`--s${i}`)),
      [WAIT]: read("--transit"), [REDUCE]: read("--reduce"), [CLOSING]: read("--closing"),
      ink: read("--ink"), quiet: read("--quiet"), line: read("--line"), track: read("--track"), card: read("--card"),
    };
  };
  const pitch = () => height + (height < 3 ? 0.5 : height < 8 ? 1 : 2);
  const across = () => transform.rescaleX(libraries.scaleLinear([0, data.end], [left, width - 8]));
  const followed = () => {
    if (pointed && pointed.micro >= 0) return microSamples[pointed.micro];
    return follow.value === "" ? null : new Set([Number(follow.value)]);
  };
  const holds = (bar, samples) => {
    for (const sample of microSamples[bar.micro]) if (samples.has(sample)) return true;
    return false;
  };

  const draw = () => {
    const ratio = devicePixelRatio || 1;
    width = scroll.clientWidth;
    left = Math.min(190, Math.max(74, width * 0.17));
    const whole = AXIS + rows.length * pitch() + 4;
    const visible = Math.min(whole, Math.max(160, Math.min(0.7 * innerHeight, 640)));
    scroll.style.height = `${visible}px`;
    spacer.style.height = `${Math.max(0, whole - visible)}px`;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${visible}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(visible * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, visible);
    const x = across(), top = scroll.scrollTop, samples = followed();
    const first = Math.max(0, Math.floor((top - AXIS) / pitch())), bottom = top + visible;
    const rowTop = (r) => AXIS + r * pitch() - top;

    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let r = first; r < rows.length && rowTop(r) < visible; r++) {
      const y = rowTop(r);
      context.globalAlpha = 1;
      context.fillStyle = colours.track;
      context.fillRect(left, y, width - 8 - left, height);
      for (const bar of rows[r].bars) {
        const from = Math.max(left, x(bar.start)), to = Math.min(width - 8, x(bar.end));
        if (to <= left || from >= width - 8) continue;
        const isComputation = bar.micro >= 0;
        context.fillStyle = isComputation ? colours.sections[data.sections[data.micros[bar.micro][0]][1] % 8] : colours[bar.code];
        context.globalAlpha = (isComputation ? [1, 0.62, 0.4][bar.kind] : 1) * (samples && !(isComputation && holds(bar, samples)) ? 0.16 : 1);
        const size = Math.max(0.6, to - from - (to - from > 3 ? 0.8 : 0));
        if (bar.code === REDUCE) context.fillRect(from, y + height * 0.7, size, height * 0.3);
        else context.fillRect(from, y, size, height);
        if (isComputation && height >= 14 && to - from > 26) {
          context.fillStyle = colours.card;
          context.globalAlpha = samples && !holds(bar, samples) ? 0.2 : 1;
          const text = `${"FBW"[bar.kind]}${data.micros[bar.micro][2]}`;
          if (context.measureText(text).width < to - from - 6) context.fillText(text, from + 4, y + height / 2 + 0.5);
        }
      }
    }
    context.globalAlpha = 1;
    if (samples) drawArrows(samples, x, rowTop, visible);

    context.fillStyle = colours.card;
    context.fillRect(0, 0, left, visible);
    context.fillRect(0, 0, width, AXIS - 2);
    const every = Math.max(1, Math.ceil(13 / pitch()));
    for (let r = first; r < rows.length && rowTop(r) < visible; r++) {
      if (r % every && r !== pointed?.row) continue;
      context.fillStyle = r === pointed?.row ? colours.ink : colours.quiet;
      const text = `${rows[r].ranks} · ${rows[r].label}`;
      context.fillText(shorten(text, left - 14), 6, rowTop(r) + height / 2 + 0.5);
    }
    context.fillStyle = colours.quiet;
    context.strokeStyle = colours.line;
    const shown = libraries.scaleLinear(x.domain().map(seconds), x.range());
    for (const tick of shown.ticks(Math.max(2, Math.floor((width - left) / 110)))) {
      const at = shown(tick);
      if (at < left || at > width - 8) continue;
      context.beginPath();
      context.moveTo(at, AXIS - 6);
      context.lineTo(at, visible);
      context.globalAlpha = 0.5;
      context.stroke();
      context.globalAlpha = 1;
      const text = page.formatSeconds(tick);
      context.fillText(text, Math.min(at + 3, width - 8 - context.measureText(text).width), 10);
    }
  };

  const shorten = (text, room) => {
    if (context.measureText(text).width <= room) return text;
    let end = text.length;
    while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > room) end--;
    return `${text.slice(0, end)}…`;
  };

  // Arrows between the sections that followed samples pass through: forwards, then gradients.
  const drawArrows = (samples, x, rowTop, visible) => {
    const found = computations.filter((bar) => holds(bar, samples));
    if (found.length > 400) return;
    context.strokeStyle = context.fillStyle = colours.ink;
    context.lineWidth = 1.2;
    const section = (bar) => data.micros[bar.micro][0];
    const connect = (from, to) => {
      const x1 = x(from.end), x2 = x(to.start), y1 = rowTop(from.row) + height / 2, y2 = rowTop(to.row) + height / 2;
      if (Math.max(x1, x2) < left || Math.min(x1, x2) > width || Math.max(y1, y2) < AXIS || Math.min(y1, y2) > visible) return;
      context.globalAlpha = 0.75;
      context.beginPath();
      context.moveTo(x1, y1);
      context.bezierCurveTo(x1 + 18, y1, x2 - 18, y2, x2, y2);
      context.stroke();
      context.beginPath();
      context.moveTo(x2, y2);
      context.lineTo(x2 - 6, y2 - 3.5);
      context.lineTo(x2 - 6, y2 + 3.5);
      context.fill();
    };
    for (const [source, target, isTwoWay] of data.edges)
      for (const a of found) {
        if (section(a) !== source) continue;
        for (const b of found) {
          if (section(b) !== target || !shares(a, b, samples)) continue;
          if (a.kind === 0 && b.kind === 0) connect(a, b);
          if (isTwoWay && a.kind === 1 && b.kind === 1) connect(b, a);
        }
      }
    context.globalAlpha = 1;
  };
  const shares = (a, b, samples) => {
    for (const sample of microSamples[a.micro]) if (samples.has(sample) && microSamples[b.micro].has(sample)) return true;
    return false;
  };

  // -- texts

  const sampleText = (sample) => `${sample}${patterns.get(sample) ? ` (${patterns.get(sample)})` : ""}`;
  const describe = (bar) => {
    const time = `${page.formatSeconds(seconds(bar.start))} to ${page.formatSeconds(seconds(bar.end))}, ${page.formatSeconds(seconds(bar.end - bar.start))}`;
    if (bar.code === WAIT) return `waits for a message in transit\n${time}`;
    if (bar.code === REDUCE) return `sums gradients with other ranks\n${time}`;
    if (bar.code === CLOSING) return `optimizer, and overheads of the step\n${time}`;
    const [section, replica, number, samples] = data.micros[bar.micro];
    const listed = samples.slice(0, 8).map(sampleText).join(", ") + (samples.length > 8 ? `, and ${samples.length - 8} more` : "");
    const ranks = rows[bar.row].ranks;
    return `${data.sections[section][0]}: ${KINDS[bar.kind]} of micro-batch ${number}, replica ${replica}\n` +
      `${/[-,]/.test(ranks) ? "ranks" : "rank"} ${ranks} · ${time}\nsamples ${listed || "none"}`;
  };

  const tellJourney = () => {
    journey.replaceChildren();
    if (follow.value === "") return;
    const sample = Number(follow.value);
    const stops = computations.filter((bar) => microSamples[bar.micro].has(sample)).sort((a, b) => a.start - b.start);
    const title = document.createElement("strong");
    title.textContent = `Sample ${sampleText(sample)} in ${stops.length} computations`;
    const list = document.createElement("ol");
    for (const bar of stops) {
      const item = document.createElement("li");
      item.textContent = `${page.formatSeconds(seconds(bar.start))}: ${data.sections[data.micros[bar.micro][0]][0]} ${KINDS[bar.kind]} on ${/[-,]/.test(rows[bar.row].ranks) ? "ranks" : "rank"} ${rows[bar.row].ranks}, with ${data.micros[bar.micro][3].length - 1} other samples`;
      list.append(item);
    }
    journey.append(title, list);
  };

  // -- moving and pointing

  const zoom = libraries.zoom().scaleExtent([1, 400]).filter((event) => {
    if (event.type === "wheel") return event.ctrlKey || event.metaKey || event.shiftKey;
    return !event.button && (event.type !== "touchstart" || event.touches.length > 1 || transform.k > 1);
  }).on("zoom", (event) => {
    transform = event.transform;
    request();
  });
  let requested = false;
  const request = () => {
    if (requested) return;
    requested = true;
    requestAnimationFrame(() => { requested = false; draw(); });
  };
  const target = libraries.select(canvas);
  const limit = () => zoom.extent([[left, 0], [width - 8, 100]]).translateExtent([[left, -Infinity], [width - 8, Infinity]]);
  target.call(zoom).on("dblclick.zoom", null);
  target.on("dblclick", () => act("whole"));

  const act = (what) => {
    limit();
    if (what === "taller" || what === "flatter") {
      const middle = (scroll.scrollTop + scroll.clientHeight / 2) / pitch();
      height = what === "taller" ? Math.min(TALLEST, height * 2) : Math.max(1, Math.floor(height / 2));
      draw();
      scroll.scrollTop = middle * pitch() - scroll.clientHeight / 2;
      request();
    } else if (what === "in" || what === "out") target.call(zoom.scaleBy, what === "in" ? 1.6 : 1 / 1.6);
    else if (what === "whole") target.call(zoom.transform, libraries.zoomIdentity);
    else target.call(zoom.translateBy, ((what === "left" ? 0.25 : -0.25) * (width - left)) / transform.k, 0);
  };
  tools.addEventListener("click", (event) => {
    const what = event.target.closest("[data-do]")?.dataset.do;
    if (what) act(what);
  });
  scroll.addEventListener("keydown", (event) => {
    const what = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "whole" }[event.key];
    if (!what || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act(what);
  });
  scroll.addEventListener("scroll", request, { passive: true });

  const find = (event) => {
    const { left: boxLeft, top } = canvas.getBoundingClientRect();
    const r = Math.floor((event.clientY - top + scroll.scrollTop - AXIS) / pitch()), at = across().invert(event.clientX - boxLeft);
    if (event.clientX - boxLeft < left || event.clientY - top < AXIS || !rows[r]) return null;
    const slack = (data.end / (width - left) / transform.k) * 1.5;
    const under = rows[r].bars.filter((bar) => bar.start - slack <= at && at <= bar.end + slack);
    return under.find((bar) => bar.micro >= 0 && bar.start <= at && at <= bar.end) ?? under[0] ?? null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const bar = find(event);
    if (bar) page.showTip(describe(bar), event.clientX, event.clientY);
    else page.hideTip();
    if (bar !== pointed) { pointed = bar; request(); }
  });
  canvas.addEventListener("pointerleave", () => { page.hideTip(); pointed = null; request(); });
  canvas.addEventListener("click", (event) => {
    const bar = find(event);
    if (!bar || bar.micro < 0 || event.defaultPrevented) return;
    const [sample] = data.micros[bar.micro][3];
    if (sample === undefined) return;
    follow.value = follow.value === `${sample}` ? "" : `${sample}`;
    tellJourney();
    request();
  });
  for (const [sample] of data.samples) {
    const option = document.createElement("option");
    option.value = sample;
    option.textContent = sampleText(sample);
    follow.append(option);
  }
  follow.addEventListener("change", () => { tellJourney(); request(); });

  const skipped = data.left_out ? ` ${data.left_out} more ranks with the same sections are left out.` : "";
  note.textContent = "Full colour is forward, lighter is backward, pale red is a message in transit, grey strips are sums of gradients, blank is idle. " +
    `Point at a bar to follow its samples, click to keep following one; Ctrl and the wheel, or two fingers, zoom.${skipped}`;
  page.drawWhenever(scroll, () => { readColours(); limit(); draw(); });
})();
