// RUN: secc opt %s -p annotate-patterns | filecheck %s

// The samples that reach a block, by their optional inputs: those with one of several, with both of two (`both`), or without any
// (`plain`). Of two inputs that always come together the one that the block reads is taken.

sec.graph "g" optional ["audio", "image", "sizes"] {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "n" kind "rows" key "image" dim 0
  sec.symbol "a" kind "rows" key "audio" dim 0
  // CHECK: sec.block "lm" class "L" params 1 trainable 1 when []
  // CHECK-NEXT: sec.block "eyes" class "V" params 1 trainable 1 when ["image"]
  // CHECK-NEXT: sec.block "ears" class "A" params 1 trainable 1 when ["audio"]
  // CHECK-NEXT: sec.block "projector" class "P" params 1 trainable 1 when ["audio", "image"]
  // CHECK-NEXT: sec.block "both" class "X" params 1 trainable 1 when ["audio&image"]
  // CHECK-NEXT: sec.block "plain" class "T" params 1 trainable 1 when ["!audio&!image"]
  sec.block "lm" class "L" params 1 trainable 1
  sec.block "eyes" class "V" params 1 trainable 1
  sec.block "ears" class "A" params 1 trainable 1
  sec.block "projector" class "P" params 1 trainable 1
  sec.block "both" class "X" params 1 trainable 1
  sec.block "plain" class "T" params 1 trainable 1
  sec.case "text" when [] {
    %ids = sec.input "ids" : !sec.tensor<[B, 8], f32>
    %t = sec.call "plain" (%ids) args "$0" outs [""] : !sec.tensor<[B, 8], f32, grad>
    %h = sec.call "lm" (%t) args "$0" outs [""] : !sec.tensor<[], f32, grad>
    sec.return (%h)
  }
  sec.case "image" when ["image", "sizes"] {
    %ids = sec.input "ids" : !sec.tensor<[B, 8], f32>
    %px = sec.input "image" : !sec.tensor<[n, 8], f32>
    %f = sec.call "eyes" (%px) args "$0" outs [""] : !sec.tensor<[n, 8], f32, grad>
    %p = sec.call "projector" (%f) args "$0" outs [""] : !sec.tensor<[n, 8], f32, grad>
    %h = sec.call "lm" (%ids, %p) args "$0, $1" outs [""] : !sec.tensor<[], f32, grad>
    sec.return (%h)
  }
  sec.case "audio" when ["audio"] {
    %ids = sec.input "ids" : !sec.tensor<[B, 8], f32>
    %wave = sec.input "audio" : !sec.tensor<[a, 8], f32>
    %f = sec.call "ears" (%wave) args "$0" outs [""] : !sec.tensor<[a, 8], f32, grad>
    %p = sec.call "projector" (%f) args "$0" outs [""] : !sec.tensor<[a, 8], f32, grad>
    %h = sec.call "lm" (%ids, %p) args "$0, $1" outs [""] : !sec.tensor<[], f32, grad>
    sec.return (%h)
  }
  sec.case "image and audio" when ["audio", "image", "sizes"] {
    %ids = sec.input "ids" : !sec.tensor<[B, 8], f32>
    %px = sec.input "image" : !sec.tensor<[n, 8], f32>
    %wave = sec.input "audio" : !sec.tensor<[a, 8], f32>
    %f = sec.call "eyes" (%px) args "$0" outs [""] : !sec.tensor<[n, 8], f32, grad>
    %g = sec.call "ears" (%wave) args "$0" outs [""] : !sec.tensor<[a, 8], f32, grad>
    %p = sec.call "projector" (%f) args "$0" outs [""] : !sec.tensor<[n, 8], f32, grad>
    %x = sec.call "both" (%p, %g) args "$0, $1" outs [""] : !sec.tensor<[n, 8], f32, grad>
    %h = sec.call "lm" (%ids, %x) args "$0, $1" outs [""] : !sec.tensor<[], f32, grad>
    sec.return (%h)
  }
}
